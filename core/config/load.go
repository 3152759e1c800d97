// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package config

import (
	"fmt"
	"os"
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

// envPrefix begins the plugin's own variables. The CSI specification reserves variables that begin with CSI_; only
// CSI_ENDPOINT of those is read.
const envPrefix = "OXIDE_CSI_"

// delim joins the keys of nested maps in koanf. No key of ours contains it.
const delim = "."

// Load makes the configuration from the flags that [Flags] added to fs, after parsing, and from environ as os.Environ
// returns it. It reads the configuration file and, unless the mode is node, the files with tokens and CAs.
//
// The error is nil or [Problems] with all problems. The warnings are lines for the log, also if there is an error.
//
// An empty variable and an empty key of the file count as not set, because templates make those. An empty flag removes
// the value of the other sources.
func Load(fs *pflag.FlagSet, environ []string) (Config, []string, error) {
	return loadAs(fs, environ, func(*Config) {}, Config.Validate)
}

// LoadIdentity is like [Load], for a process that only needs to know its node. It checks only the settings of
// [IdentityFlags]. The result has no token of a rack and no endpoint.
func LoadIdentity(fs *pflag.FlagSet, environ []string) (Config, []string, error) {
	return loadAs(fs, environ, func(c *Config) { c.Mode = ModeNode }, Config.validateIdentity)
}

// LoadOperator is like [Load], for a command that looks at a rack, at this node and at an orchestrator. It checks only
// the settings of [OperatorFlags]. If neither a mode nor a rack is set, the mode is node: the command asks no rack.
// Otherwise the settings of the rack must be complete.
func LoadOperator(fs *pflag.FlagSet, environ []string) (Config, []string, error) {
	return loadAs(fs, environ, func(c *Config) {
		switch {
		case c.Mode != "":
		case c.OxideHost != "" || len(c.Racks) > 0:
			c.Mode = ModeController
		default:
			c.Mode = ModeNode
		}
	}, Config.validateOperator)
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
	l.config.Racks = l.file.racks
	adjust(&l.config)
	l.config.RackGiven = l.from["rack"] != ""
	warnings := l.applyMode()
	if len(unknown) > 0 {
		warnings = append(warnings,
			fmt.Sprintf("config: unknown environment variables are ignored: %s", strings.Join(unknown, ", ")))
	}

	for _, p := range validate(l.config) {
		// A setting that could not be parsed was reported. Its zero value means nothing.
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

// ofCommands are the variables that only oxide-csi volume, snapshot and doctor use.
var ofCommands = []string{"OXIDE_CSI_CONTROLLER_ENDPOINT", "OXIDE_CSI_NODE_ENDPOINT", "OXIDE_CSI_STAGING_DIR"}

// loader is one run of Load.
type loader struct {
	merged   *koanf.Koanf      // key -> text, of all layers
	from     map[string]string // key -> origin of the value; "" is the default
	file     file
	config   Config
	token    Token // the value of OXIDE_TOKEN, used or not
	problems Problems
}

// merge reads the four layers, the weakest first. It returns the names of unknown variables with the prefix of ours.
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
			case !known && strings.HasPrefix(name, envPrefix) && !slices.Contains(ofCommands, name):
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
				return "", nil // a flag of cmd, such as --help
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

// load reads a provider of koanf. The providers read memory or report their own problems, so an error is a bug here.
func (l *loader) load(k *koanf.Koanf, p koanf.Provider) {
	if err := k.Load(p, nil); err != nil {
		l.problems.add("configuration", "%v", err)
	}
}

// overlay merges one layer over the others, and records the origin of its values.
func (l *loader) overlay(layer *koanf.Koanf, origin func(setting) string) {
	if err := l.merged.Merge(layer); err != nil {
		l.problems.add("configuration", "%v", err)
	}
	for _, s := range settings() {
		if layer.Exists(s.key) {
			l.from[s.key] = origin(s)
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
			continue // derive sets it
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
	// kubernetesRestartWait is less than the two minutes that the manifests give csi-attacher for a call. Nomad makes one
	// call to the plugin at a time, so there the call must not wait.
	kubernetesRestartWait = 100 * time.Second
	// nomadDetachGrace is longer than a restart of the node plugin takes. While the node plugin is down, Nomad requests a
	// detach before the node has unmounted (docs/explanation/nomad.md). Kubernetes does not.
	nomadDetachGrace = time.Minute
)

// derive sets the values that depend on the orchestrator, unless an operator set them.
func (l *loader) derive() {
	c := &l.config
	if l.from["restartWait"] == "" && c.Orchestrator() == MetadataKubernetes {
		c.RestartWait = kubernetesRestartWait
	}
	if l.from["detachGrace"] == "" && (c.Orchestrator() == MetadataNomad || c.NomadAllocation != "") {
		c.DetachGrace = nomadDetachGrace
	}
}

// applyMode removes the values that this mode must not have. It returns a warning for each other value that is set but
// not used.
func (l *loader) applyMode() (warnings []string) {
	c := &l.config
	if len(c.Racks) == 1 && !c.RackGiven && metadata.CheckRack(c.Racks[0].Name) == nil {
		// A single entry in the file names this rack, as the flags do.
		c.Rack = c.Racks[0].Name
	}
	if c.Mode == ModeNode {
		// A node must have no token and calls no rack. Its environment often sets both, because it is shared with the
		// controller or with the oxide CLI.
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
			warnings = append(warnings, fmt.Sprintf("config: %s is not https: the token crosses the network in plaintext", host))
		}
		if info, err := os.Stat(rack.TokenFile); err == nil && info.Mode().Perm()&0o004 != 0 {
			warnings = append(warnings,
				fmt.Sprintf("config: every user can read the token file %s: set its mode to 0600 or 0440", rack.TokenFile))
		}
	}
	return warnings
}

// report adds a problem, with the origin of the value unless the problem already names that flag.
func (l *loader) report(p Problem) {
	s, known := findSetting(func(s setting) bool { return s.label() == p.Flag })
	if from := l.from[s.key]; known && from != "" && from != p.Flag {
		p.What += " (set by " + from + ")"
	}
	l.problems = append(l.problems, p)
}
