// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package config

import (
	"errors"
	"reflect"

	"github.com/spf13/pflag"
)

// Flags adds the flag of every setting to fs. The flags take any text, so that
// parsing the command line never stops at a bad value: [Load] reports it
// together with all other problems. There is no flag for the token, since a
// command line is readable by every process on the machine.
func Flags(fs *pflag.FlagSet) { addFlags(fs, func(setting) bool { return true }) }

// IdentityFlags adds the flags of [LoadIdentity].
func IdentityFlags(fs *pflag.FlagSet) { addFlags(fs, func(s setting) bool { return s.identity }) }

func addFlags(fs *pflag.FlagSet, wanted func(setting) bool) {
	for _, s := range settings() {
		if s.flag == "" || !wanted(s) {
			continue
		}
		flag := fs.VarPF(&flagText{text: s.def, kind: kindName(s.typ)}, s.flag, "", s.help+" ["+s.env+"]")
		if s.typ == reflect.TypeFor[bool]() {
			flag.NoOptDefVal = "true"
		}
	}
}

// FlagProblem turns an error of parsing the command line into a problem, so
// that it reads like all others: an unknown flag, or one without its value.
func FlagProblem(err error) Problem {
	var unknown *pflag.NotExistError
	var noValue *pflag.ValueRequiredError
	switch {
	case errors.As(err, &unknown) && unknown.GetSpecifiedShortnames() == "":
		return Problem{Flag: scrub("--"+unknown.GetSpecifiedName(), Token{}), What: "unknown flag; see --help"}
	case errors.As(err, &unknown):
		// Not the name alone: what follows a single dash may be anything.
		return Problem{Flag: "-" + unknown.GetSpecifiedName(), What: "unknown flag; see --help, flags begin with two dashes"}
	case errors.As(err, &noValue):
		return Problem{Flag: scrub("--"+noValue.GetSpecifiedName(), Token{}), What: "needs a value; see --help"}
	}
	return Problem{Flag: "command line", What: scrub(err.Error(), Token{})}
}

// flagText is a flag's value as it was written.
type flagText struct{ text, kind string }

func (f *flagText) String() string { return f.text }
func (f *flagText) Type() string   { return f.kind }

// Set implements pflag.Value.
func (f *flagText) Set(text string) error {
	f.text = text
	return nil
}

// kindName is the placeholder that --help and the reference show for a type.
func kindName(typ reflect.Type) string {
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
