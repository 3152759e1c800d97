// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"errors"
	"fmt"
	"math"
	"net"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/spf13/pflag"

	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// serveFlags are the flags of serve before parsing. They are strings, so that parse can report all problems together.
type serveFlags struct {
	listen, control, tls, token, project, instances, guestRoot, guestBoot, state, hotplug string
	maxDisks, quota, space, latency, latencyMax, stateTime, apiVersionMax                 string
	expose                                                                                bool
	plugDelay, snapshotTime, creatingTime, spaceReturns                                   string
	world                                                                                 simrack.World
}

func (f *serveFlags) define(flags *pflag.FlagSet) {
	flags.SortFlags = false
	flags.StringVar(
		&f.listen,
		"listen",
		"127.0.0.1:12220",
		"serve the rack's API on `ADDR`, a loopback address; port 0 is a free one",
	)
	flags.StringVar(&f.control, "control", "", "serve the control endpoint on `ADDR`, a loopback address (default off)")
	flags.BoolVar(
		&f.expose,
		"expose",
		false,
		"allow addresses that other machines can reach; all who reach the control endpoint can do anything with the rack",
	)
	flags.StringVar(
		&f.tls,
		"tls",
		"",
		"serve the rack's API over TLS with HTTP/2; certificate and key are in `DIR`, made if missing (default plain HTTP)",
	)
	flags.StringVar(&f.token, "token", "oxide-token-demo", "`TOKEN` of a project collaborator; begins oxide-token-")
	flags.StringVar(&f.project, "project", "demo", "`NAME` of the project")
	flags.StringVar(&f.instances, "instances", "node-a,node-b", "comma-separated `NAMES` of running instances")
	flags.StringVar(
		&f.guestRoot,
		"guest-root",
		"",
		"give instances guests, with dev and sys below `DIR`; needs root (default no guests)",
	)
	flags.StringVar(
		&f.guestBoot,
		"guest-boot",
		"",
		"run the binary `FILE` as the first process of each guest; see oxide-sim guest-init --help (default none)",
	)
	flags.StringVar(
		&f.state,
		"state",
		"",
		"keep all records and disks in `DIR`, and continue with existing ones (default keep nothing)",
	)
	flags.StringVar(
		&f.hotplug,
		"hotplug",
		"",
		"allow attach and detach while an instance runs; `MODE` async shows attaching and detaching first, "+
			"attach-first shows a disk as attached before the guest has it",
	)
	flags.Lookup("hotplug").NoOptDefVal = hotplugOn
	flags.StringVar(&f.maxDisks, "max-disks", "12", "`N` disks per instance, including the boot disk")
	flags.StringVar(&f.quota, "quota", "0", "storage quota of `SIZE`; 0 is unlimited")
	flags.StringVar(&f.space, "space", "0", "physical storage of `SIZE`; 0 is unlimited")
	flags.StringVar(&f.latency, "latency", "0s", "add `TIME` to every call")
	flags.StringVar(&f.latencyMax, "latency-max", "0s", "add a random time from --latency to `TIME` to every call")
	flags.StringVar(&f.stateTime, "state-time", "0s", "`TIME` that an instance takes to start, stop or reboot")
	flags.StringVar(&f.plugDelay, "plug-delay", "0s", "`TIME` until the guest has a disk, with --hotplug=attach-first")
	flags.IntVar(
		&f.world.PlugFails, "plug-fails", 0, "let `N` attaches fail after the disk shows attached, -1 all of them")
	flags.BoolVar(
		&f.world.NoUnplug, "no-unplug", false, "detach disks only while an instance is stopped, also with --hotplug")
	flags.StringVar(&f.snapshotTime, "snapshot-time", "0s", "`TIME` that a snapshot takes")
	flags.StringVar(&f.creatingTime, "creating-time", "0s", "`TIME` that a new disk shows creating")
	flags.BoolVar(&f.world.Pantry, "pantry", false, "let a start spoil the snapshot of a disk of a stopped instance")
	flags.StringVar(&f.spaceReturns, "space-returns", "0s", "`TIME` from the deletion of a disk until its space returns")
	flags.StringVar(
		&f.world.StartRefusal, "start-refusal", "",
		"refuse a start after it has begun; then the instance is stopped (`quota`) or failed")
	flags.StringVar(&f.world.Messages, "messages", "", "`other` gives all refusals other words (default those of a rack)")
	flags.StringVar(&f.apiVersionMax, "api-version-max", "2026060800.0.0", "serve API versions up to `V`")
}

// The values of --hotplug.
const (
	hotplugOn    = "on"
	hotplugAsync = "async"
	// hotplugAttachFirst is the prototype of 2026, see [simrack.World].
	hotplugAttachFirst = "attach-first"
)

// serveConfig is the parsed configuration of serve.
type serveConfig struct {
	listen, control string // control is empty without a control endpoint
	tls             string // the folder of the certificate and its key; empty for plain HTTP
	// Each is empty if not used.
	guestRoot, guestBoot, state string
	rack                        simrack.Options
}

// parse parses the flags. Its error is [config.Problems].
func (f *serveFlags) parse() (serveConfig, error) {
	var problems config.Problems
	check := func(flag string, err error) {
		if err != nil {
			problems = append(problems, config.Problem{Flag: flag, What: err.Error()})
		}
	}
	c := serveConfig{
		listen: f.listen, control: f.control, tls: f.tls, guestRoot: f.guestRoot, guestBoot: f.guestBoot, state: f.state,
	}
	checkListen := checkLoopback
	if f.expose {
		checkListen = checkAddress
	}
	check("--listen", checkListen(f.listen))
	if f.control != "" {
		check("--control", checkListen(f.control))
	}
	if f.guestBoot != "" && f.guestRoot == "" {
		check("--guest-boot", errors.New("requires --guest-root"))
	}
	r := &c.rack
	r.Token, r.Project, r.APIVersionMax = f.token, f.project, f.apiVersionMax
	check("--token", checkToken(f.token))
	check("--project", checkRack(f.project, simrack.Options{Project: f.project}))
	var err error
	r.Instances, err = parseInstances(f.instances)
	check("--instances", err)
	r.World = f.world
	check("--hotplug", parseHotplug(f.hotplug, r))
	check("--plug-delay", parseMilliseconds(f.plugDelay, &r.PlugDelayMS))
	check("--snapshot-time", parseMilliseconds(f.snapshotTime, &r.SnapshotMS))
	check("--creating-time", parseMilliseconds(f.creatingTime, &r.CreatingMS))
	check("--space-returns", parseMilliseconds(f.spaceReturns, &r.SpaceReturnsMS))
	check("--plug-fails", checkRack("-", simrack.Options{World: simrack.World{PlugFails: f.world.PlugFails}}))
	check("--start-refusal", checkRack("-", simrack.Options{World: simrack.World{StartRefusal: f.world.StartRefusal}}))
	check("--messages", checkRack("-", simrack.Options{World: simrack.World{Messages: f.world.Messages}}))
	r.MaxDisks, err = parseMaxDisks(f.maxDisks)
	check("--max-disks", err)
	r.QuotaBytes, err = parseSize(f.quota)
	check("--quota", err)
	r.SpaceBytes, err = parseSize(f.space)
	check("--space", err)
	r.Latency, err = parseTime(f.latency)
	check("--latency", err)
	if r.LatencyMax, err = parseTime(f.latencyMax); err == nil {
		err = checkRack(f.latencyMax, simrack.Options{Latency: r.Latency, LatencyMax: r.LatencyMax})
	}
	check("--latency-max", err)
	r.StateTime, err = parseTime(f.stateTime)
	check("--state-time", err)
	check("--api-version-max", checkRack(f.apiVersionMax, simrack.Options{APIVersionMax: f.apiVersionMax}))
	if len(problems) > 0 {
		return serveConfig{}, problems
	}
	return c, nil
}

// checkRack checks an option with the rack's own check: it creates a rack in memory with only this option.
func checkRack(text string, only simrack.Options) error {
	if text == "" {
		return errors.New("must not be empty")
	}
	r, err := simrack.New(only)
	if err != nil {
		return err
	}
	return r.Close()
}

func checkToken(token string) error {
	if strings.ContainsFunc(token, unicode.IsSpace) {
		return errors.New("must not contain white space")
	}
	return checkRack(token, simrack.Options{Token: token})
}

func checkAddress(address string) error {
	_, port, err := net.SplitHostPort(address)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err != nil {
		return fmt.Errorf("%q is not an address with a port: write one such as 127.0.0.1:12220", address)
	}
	return nil
}

// checkLoopback keeps the control endpoint, which has no authentication, and the API, whose token everybody knows, on
// this machine.
func checkLoopback(address string) error {
	if err := checkAddress(address); err != nil {
		return err
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return err
	}
	if !isLoopback(host) {
		return fmt.Errorf("%q is not a loopback address: write one such as 127.0.0.1:12221, or add --expose", address)
	}
	return nil
}

func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

func parseInstances(text string) ([]string, error) {
	if text == "" {
		return nil, nil
	}
	names := strings.Split(text, ",")
	seen := map[string]bool{}
	for _, name := range names {
		if seen[name] {
			return nil, fmt.Errorf("%q is given twice", name)
		}
		seen[name] = true
	}
	return names, checkRack(text, simrack.Options{Instances: names})
}

func parseHotplug(text string, into *simrack.Options) error {
	switch text {
	case "":
	case hotplugOn:
		into.Hotplug = true
	case hotplugAsync:
		into.Hotplug, into.HotplugAsync = true, true
	case hotplugAttachFirst:
		into.AttachFirst = true
	default:
		return fmt.Errorf(
			"%q is not a mode of hot-plug: write --hotplug, --hotplug=async or --hotplug=attach-first", text)
	}
	return nil
}

func parseMilliseconds(text string, into *float64) error {
	d, err := parseTime(text)
	*into = float64(d) / float64(time.Millisecond)
	return err
}

func parseMaxDisks(text string) (int, error) {
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		return 0, fmt.Errorf("%q is not a number of disks: write 1 to 12", text)
	}
	return n, checkRack(text, simrack.Options{MaxDisks: n})
}

func parseTime(text string) (time.Duration, error) {
	d, err := time.ParseDuration(text)
	if err != nil || d < 0 {
		return 0, fmt.Errorf("%q is not a time: write one such as 50ms or 2s", text)
	}
	return d, nil
}

var sizeUnits = []struct {
	name  string
	bytes int64
}{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"", 1}}

func parseSize(text string) (int64, error) {
	for _, unit := range sizeUnits {
		number, ok := strings.CutSuffix(text, unit.name)
		if !ok {
			continue
		}
		n, err := strconv.ParseUint(number, 10, 63)
		if err != nil || n > uint64(math.MaxInt64/unit.bytes) {
			break
		}
		return int64(n) * unit.bytes, nil
	}
	return 0, fmt.Errorf("%q is not a size: write bytes, or a whole number of KiB, MiB, GiB or TiB such as 10GiB", text)
}
