// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package config

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// Flags adds the flag of every setting to fs. The flags accept any text, so that parsing the command line does not stop
// at a bad value: [Load] reports all problems together. There is no flag for the token, because every process on the
// machine can read a command line.
func Flags(fs *pflag.FlagSet) { addFlags(fs, func(setting) bool { return true }) }

// IdentityFlags adds the flags of [LoadIdentity].
func IdentityFlags(fs *pflag.FlagSet) { addFlags(fs, func(s setting) bool { return s.identity }) }

// OperatorFlags adds the flags of [LoadOperator].
func OperatorFlags(fs *pflag.FlagSet) { addFlags(fs, func(s setting) bool { return s.operator }) }

func addFlags(fs *pflag.FlagSet, wanted func(setting) bool) {
	for _, s := range settings() {
		if s.flag == "" || !wanted(s) {
			continue
		}
		usage := s.help + " [" + s.env + "]"
		switch {
		case s.required == "always":
			usage += " (required)"
		case s.required == "controller":
			usage += " (required " + requiredInModes + ")"
		case s.derived != "":
			usage += " (default " + s.derived + ")"
		}
		flag := fs.VarPF(&flagText{text: s.def, kind: typeName(s.typ)}, s.flag, "", usage)
		flag.Hidden = s.hidden
		if s.typ == reflect.TypeFor[bool]() {
			flag.NoOptDefVal = "true"
		}
	}
}

// Group is a heading of --help with its flags.
type Group struct {
	Name string
	// Flags are in the order in which --help shows them.
	Flags *pflag.FlagSet
	// Note is a line below the flags, or empty.
	Note string
}

// Groups returns the visible flags of fs that [Flags] or [IdentityFlags] added, by group. others are all other flags.
func Groups(fs *pflag.FlagSet) (groups []Group, others *pflag.FlagSet) {
	others = newFlagSet()
	fs.VisitAll(func(flag *pflag.Flag) {
		if _, ours := flag.Value.(*flagText); !ours {
			others.AddFlag(flag)
		}
	})
	for _, s := range settings() {
		flag := fs.Lookup(s.flag)
		if flag == nil || flag.Hidden || others.Lookup(s.flag) != nil {
			continue
		}
		if len(groups) == 0 || groups[len(groups)-1].Name != s.group {
			groups = append(groups, Group{Name: s.group, Flags: newFlagSet(), Note: groupNote(s.group)})
		}
		groups[len(groups)-1].Flags.AddFlag(flag)
	}
	return groups, others
}

func newFlagSet() *pflag.FlagSet {
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	fs.SortFlags = false
	return fs
}

// groupNote lists the variables of a group that Nomad itself defines.
func groupNote(group string) string {
	var names []string
	for _, s := range settings() {
		if s.group == group && strings.HasPrefix(s.env, "NOMAD_") {
			names = append(names, s.env)
		}
	}
	if len(names) == 0 {
		return ""
	}
	return "Nomad's own variables are read too: " + strings.Join(names, ", ")
}

// FlagProblem turns an error of parsing the command line into a problem: an unknown flag, or a flag without its value.
func FlagProblem(err error) Problem {
	var unknown *pflag.NotExistError
	var noValue *pflag.ValueRequiredError
	var invalid *pflag.InvalidValueError
	switch {
	case errors.As(err, &unknown) && unknown.GetSpecifiedShortnames() == "":
		return Problem{Flag: redactTokens("--"+unknown.GetSpecifiedName(), Token{}), What: "unknown flag; see --help"}
	case errors.As(err, &unknown):
		// Only the first letter: the text after a single dash could be a secret.
		return Problem{Flag: "-" + unknown.GetSpecifiedName(), What: "unknown flag; see --help, flags begin with two dashes"}
	case errors.As(err, &noValue):
		return Problem{Flag: redactTokens("--"+noValue.GetSpecifiedName(), Token{}), What: "needs a value; see --help"}
	case errors.As(err, &invalid):
		return Problem{Flag: "--" + invalid.GetFlag().Name, What: redactTokens(invalidValue(invalid), Token{})}
	}
	return Problem{Flag: "command line", What: redactTokens(err.Error(), Token{})}
}

// invalidValue says what is wrong with a value, in the words of [decode] for the types that it knows.
func invalidValue(invalid *pflag.InvalidValueError) string {
	cause, value := invalid.Unwrap(), quote(invalid.GetValue())
	switch invalid.GetFlag().Value.Type() {
	case "duration":
		_, cause = decode(invalid.GetValue(), reflect.TypeFor[time.Duration]())
	case "bool":
		_, cause = decode(invalid.GetValue(), reflect.TypeFor[bool]())
	}
	if what := fmt.Sprint(cause); strings.Contains(what, value) {
		return what
	}
	return fmt.Sprintf("%s %v", value, cause)
}

// flagText is a flag's value as the user wrote it.
type flagText struct{ text, kind string }

func (f *flagText) String() string { return f.text }
func (f *flagText) Type() string   { return f.kind }

// Set implements pflag.Value.
func (f *flagText) Set(text string) error {
	f.text = text
	return nil
}

// typeName is the placeholder that --help and the reference show for a type.
func typeName(typ reflect.Type) string {
	switch typ {
	case reflect.TypeFor[Size]():
		return "size"
	case reflect.TypeFor[bool]():
		return "bool"
	case reflect.TypeFor[int]():
		return "int"
	}
	if typ.PkgPath() == "time" {
		return "duration"
	}
	return "string"
}
