// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package config

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/knadh/koanf/providers/confmap"
	"github.com/knadh/koanf/providers/env/v2"
	"github.com/knadh/koanf/providers/posflag"
	"github.com/knadh/koanf/v2"
	"github.com/spf13/pflag"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// envPrefix begins the variables that are ours alone. Of those that begin with
// CSI_, which the CSI specification keeps for itself, only CSI_ENDPOINT is read.
const envPrefix = "OXIDE_CSI_"

// delim joins the keys of nested maps in koanf. No key holds one.
const delim = "."

// Load makes the configuration from the flags that [Flags] added to fs, which
// has been parsed, and from environ, as os.Environ returns it. It reads the
// configuration file and, unless the mode is node, the files of tokens and CAs;
// nothing else.
//
// The error is nil or [Problems] with everything that is wrong. The warnings
// are lines for the log, and are worth printing in either case.
//
// A variable that is set to nothing, and a key of the file with nothing after
// it, count as not set: templates make those. A flag that is set to nothing
// takes the value away that another source gives.
func Load(fs *pflag.FlagSet, environ []string) (Config, []string, error) {
	return loadAs(fs, environ, func(*Config) {}, Config.Validate)
}

// LoadIdentity is Load for a process that serves nothing and wants to know only
// which node it is on: of the settings, those of [IdentityFlags] are asked for. It
// has neither the rack's token nor an endpoint.
func LoadIdentity(fs *pflag.FlagSet, environ []string) (Config, []string, error) {
	return loadAs(fs, environ, func(c *Config) { c.Mode = ModeNode }, Config.validateIdentity)
}

func loadAs(
	fs *pflag.FlagSet,
	environ []string,
	adjust func(*Config),
	validate func(Config) Problems,
) (Config, []string, error) {
	l := loader{merged: koanf.New(delim), from: map[string]string{}}
	unknown := l.merge(fs, environ)
	l.decode()
	l.derive()
	adjust(&l.config)
	l.config.Racks = l.file.racks
	l.config.RackGiven = l.from["rack"] != ""
	warnings := l.applyMode()
	if len(unknown) > 0 {
		warnings = append(
			warnings,
			fmt.Sprintf("config: unknown environment variables are ignored: %s", strings.Join(unknown, ", ")),
		)
	}

	for _, p := range validate(l.config) {
		// What cannot even be read was reported, and its zero value means nothing.
		if !l.problems.has(p.Flag) {
			l.report(p)
		}
	}
	for i := range warnings {
		warnings[i] = redactTokens(warnings[i], l.token)
	}
	if len(l.problems) == 0 {
		l.config.normalise()
		return l.config, warnings, nil
	}
	for i := range l.problems {
		l.problems[i].Flag = redactTokens(l.problems[i].Flag, l.token)
		l.problems[i].What = redactTokens(l.problems[i].What, l.token)
	}
	return Config{}, warnings, l.problems
}

// loader is one run of Load.
type loader struct {
	merged   *koanf.Koanf      // key -> text, of all layers
	from     map[string]string // key -> who set it; "" is the default
	file     file
	config   Config
	token    Token // what OXIDE_TOKEN holds, used or not
	problems Problems
}

// merge reads the four layers, the weakest first, and returns the names of
// variables that look like ours and are not.
func (l *loader) merge(fs *pflag.FlagSet, environ []string) (unknown []string) {
	defaults := map[string]any{}
	for _, s := range settings() {
		if s.typ != reflect.TypeFor[[]Rack]() {
			defaults[s.key] = s.def
		}
	}
	variables := env.Provider(delim, env.Opt{
		EnvironFunc: func() []string { return environ },
		TransformFunc: func(name, value string) (string, any) {
			s, known := findSetting(func(s setting) bool { return s.env == name && name != "" })
			value = strings.TrimSpace(value)
			switch {
			case !known && strings.HasPrefix(name, envPrefix):
				unknown = append(unknown, fmt.Sprintf("%q", name))
				return "", nil
			case !known || value == "":
				return "", nil
			}
			return s.key, value
		},
	})
	environment, commandLine := koanf.New(delim), koanf.New(delim)
	l.load(environment, variables)
	if fs != nil {
		l.load(commandLine, posflag.ProviderWithFlag(fs, delim, nil, func(flag *pflag.Flag) (string, any) {
			s, known := findSetting(func(s setting) bool { return s.flag == flag.Name })
			if !known {
				return "", nil // One of cmd's own, such as --help.
			}
			return s.key, strings.TrimSpace(flag.Value.String())
		}))
	}

	l.load(l.merged, confmap.Provider(defaults, ""))
	l.file.path = environment.String("config")
	if commandLine.Exists("config") {
		l.file.path = commandLine.String("config")
	}
	if l.file.path != "" {
		fromFile := koanf.New(delim)
		l.load(fromFile, &l.file)
		l.overlay(fromFile, func(s setting) string { return fmt.Sprintf("%s line %d", l.file.path, l.file.lines[s.key]) })
	}
	l.overlay(environment, func(s setting) string { return s.env })
	l.overlay(commandLine, setting.label)
	slices.Sort(unknown)
	return slices.Compact(unknown)
}

// load reads a provider. All of ours read memory or report for themselves, so
// an error is one of this package.
func (l *loader) load(k *koanf.Koanf, p koanf.Provider) {
	if err := k.Load(p, nil); err != nil {
		l.problems.add("configuration", "%v", err)
	}
}

// overlay lays one layer over those already merged, and remembers who set what.
func (l *loader) overlay(layer *koanf.Koanf, who func(setting) string) {
	if err := l.merged.Merge(layer); err != nil {
		l.problems.add("configuration", "%v", err)
	}
	for _, s := range settings() {
		if layer.Exists(s.key) {
			l.from[s.key] = who(s)
		}
	}
}

// decode fills the struct from the merged texts.
func (l *loader) decode() {
	l.problems = append(l.problems, l.file.problems...)
	fields := reflect.ValueOf(&l.config).Elem()
	for _, s := range settings() {
		if s.typ == reflect.TypeFor[[]Rack]() {
			continue
		}
		if s.derived != "" && l.from[s.key] == "" {
			continue // Set by derive.
		}
		text := l.merged.String(s.key)
		value, err := decode(text, s.typ)
		if err != nil {
			l.report(Problem{Flag: s.label(), What: quote(text) + " " + err.Error()})
			continue
		}
		fields.Field(s.field).Set(reflect.ValueOf(value))
	}
	l.token = l.config.OxideToken
}

// Defaults that depend on the orchestrator.
const (
	// kubernetesRestartWait is within the two minutes that the manifests give csi-attacher for a call. Nomad serves no
	// other volume of the plugin during a call, so there the call must not wait.
	kubernetesRestartWait = 100 * time.Second
	// nomadDetachGrace outlasts the restart of a node plugin. Nomad asks for a detach before a node has unmounted, if that
	// node's plugin is away (docs/how-to/nomad.md). Kubernetes does not.
	nomadDetachGrace = time.Minute
)

// derive sets what depends on the orchestrator, unless an operator set it.
func (l *loader) derive() {
	c := &l.config
	if l.from["restartWait"] == "" && c.Orchestrator() == MetadataKubernetes {
		c.RestartWait = kubernetesRestartWait
	}
	if l.from["detachGrace"] == "" && (c.Orchestrator() == MetadataNomad || c.NomadAllocation != "") {
		c.DetachGrace = nomadDetachGrace
	}
}

// applyMode drops what this process must not have, and says what else it does not
// use although somebody set it.
func (l *loader) applyMode() (warnings []string) {
	c := &l.config
	if len(c.Racks) == 1 && !c.RackGiven && metadata.CheckRack(c.Racks[0].Name) == nil {
		// One entry in the file is the same as the flags: it names this rack.
		c.Rack = c.Racks[0].Name
	}
	if c.Mode == ModeNode {
		// A node holds no token and calls no rack. Its environment often has
		// both, shared with the controller or with the oxide CLI.
		c.OxideHost, c.OxideProject, c.OxideTokenFile, c.OxideCAFile, c.OxideToken = "", "", "", "", Token{}
		for i := range c.Racks {
			c.Racks[i] = Rack{Name: c.Racks[i].Name}
		}
		return nil
	}
	if !c.OxideToken.Empty() && (c.OxideTokenFile != "" || len(c.Racks) > 0) {
		warnings = append(warnings, "config: OXIDE_TOKEN is not used, because a token file is named")
		c.OxideToken = Token{}
	}
	for _, rack := range c.RackList() {
		if host, err := hostURL(rack.Host); err == nil && strings.HasPrefix(host, "http:") && !isLoopback(host) {
			warnings = append(warnings, fmt.Sprintf("config: %s is not https: the token crosses the network in clear", host))
		}
	}
	return warnings
}

// report notes a problem, with where the value came from unless that is the
// flag which it names anyway.
func (l *loader) report(p Problem) {
	s, known := findSetting(func(s setting) bool { return s.label() == p.Flag })
	if from := l.from[s.key]; known && from != "" && from != p.Flag {
		p.What += " (set by " + from + ")"
	}
	l.problems = append(l.problems, p)
}
