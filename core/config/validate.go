// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package config

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// Bounds of --max-disks. An instance has a boot disk, so with less than 2 it could have no volume. 64 is far above the
// limit of any rack, and catches a typing error.
const (
	minMaxDisks = 2
	maxMaxDisks = 64
)

// Bounds of --luks-memory. argon2id accepts less, which an attacker tries too fast;
// cryptsetup accepts no more than 4 GiB.
const (
	minLUKSMemory = Size(1) << 20
	maxLUKSMemory = Size(4) << 30
)

// maxNameBytes is the rack's limit for names, and the plugin's limit for cluster IDs.
const maxNameBytes = 63

var (
	// clusterIDs is the plugin's own rule. Identifiers of any orchestrator fit, including UUIDs.
	clusterIDs = regexp.MustCompile(`^[a-z0-9-]+$`)
	// oxideNames is the rack's rule for names (docs/reference/rack.md §2). The rack takes a UUID for an ID.
	oxideNames = regexp.MustCompile(`^[a-z]([a-z0-9-]*[a-z0-9])?$`)
	// nodeNames and labelNames are Kubernetes' rules for the names of Nodes (DNS subdomains), and of labels and
	// annotations, without the length.
	nodeNames  = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$`)
	labelNames = regexp.MustCompile(`^([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$`)
)

// errToken rejects an API token in place of another value. Most values get into logs, and some into descriptions of
// disks, the topology or a look-up of a name.
var errToken = errors.New("looks like an API token, which is a secret: a name belongs here")

// looksLikeToken reports whether a value, or a part of it such as the host of a URL, begins like a token.
func looksLikeToken(value string) bool {
	separates := func(r rune) bool { return strings.ContainsRune("/:,=", r) }
	for part := range strings.FieldsFuncSeq(strings.ToLower(value), separates) {
		if strings.HasPrefix(part, TokenPrefix) {
			return true
		}
	}
	return false
}

// checkTokens rejects an API token in every setting that is neither the token nor a path, which may have such a name.
func (c Config) checkTokens(p *Problems) {
	for _, s := range settings() {
		value := reflect.ValueOf(c).Field(s.field)
		if s.typ.Kind() != reflect.String || filepath.IsAbs(value.String()) || s.flag == "oxide-token-file" {
			continue
		}
		if looksLikeToken(value.String()) {
			p.add(s.label(), "%v", errToken)
		}
	}
	for i, rack := range c.Racks {
		for key, value := range map[string]string{"name": rack.Name, "host": rack.Host, "project": rack.Project} {
			if looksLikeToken(value) {
				p.add(fmt.Sprintf("racks[%d].%s", i, key), "%v", errToken)
			}
		}
	}
}

// Validate returns all problems of c, in the order of its fields. It reads the token file and the CA file of each rack
// that c's mode serves, and no other file. Without a valid mode it checks as for mode all.
func (c Config) Validate() Problems {
	var p Problems
	if !c.Mode.Controller() && !c.Mode.Node() {
		if c.Mode != "" {
			oneOf(&p, "--mode", c.Mode, ModeController, ModeNode, ModeAll)
		} else {
			p.addMissing("--mode", "is required; set --mode or OXIDE_CSI_MODE to controller, node or all")
		}
		c.Mode = ModeAll
	}
	c.checkTokens(&p)
	c.checkRequired(&p, requiredInModes)
	if _, err := socketPath(c.Endpoint); err != nil && c.Endpoint != "" {
		p.add("--endpoint", "%v", err)
	}
	c.checkRacks(&p)
	c.checkClusterID(&p)
	c.checkRackName(&p)
	c.checkNode(&p)
	c.checkServing(&p)
	return p
}

func (c Config) checkClusterID(p *Problems) {
	if c.ClusterID != "" && (len(c.ClusterID) > maxNameBytes || !clusterIDs.MatchString(c.ClusterID)) {
		p.add("--cluster-id", "%s is not 1 to 63 of a-z, 0-9 and '-'", quote(c.ClusterID))
	}
}

// normalise rewrites values that have several notations. Validate must have found no problem.
func (c *Config) normalise() {
	keep := func(value *string, as func(string) (string, error)) {
		if text, err := as(*value); err == nil {
			*value = text
		}
	}
	keep(&c.Endpoint, socketPath)
	keep(&c.InstanceID, metadata.ParseInstanceID)
	keep(&c.OxideHost, hostURL)
	keep(&c.OxideProject, projectRef)
	for i := range c.Racks {
		keep(&c.Racks[i].Host, hostURL)
		keep(&c.Racks[i].Project, projectRef)
	}
}

// projectRef returns a project as the rack's API names it. A name stays as it is, also one that looks like an ID.
func projectRef(project string) (string, error) {
	if oxideNames.MatchString(project) {
		return project, nil
	}
	return metadata.ParseInstanceID(project)
}

// requiredInModes says when a setting of a rack is required.
const requiredInModes = "in modes controller and all"

// checkRequired adds a problem for every setting that this mode requires and that is not set. when says when those of a
// rack are.
func (c Config) checkRequired(p *Problems, when string) {
	for _, s := range settings() {
		modes := ""
		switch {
		case s.required == "always":
		case s.required == "controller" && c.Mode.Controller():
			modes = " " + when
		default:
			continue
		}
		oneRack := strings.HasPrefix(s.flag, "oxide-")
		tokenInEnv := s.flag == "oxide-token-file" && !c.OxideToken.Empty()
		if oneRack && len(c.Racks) > 0 || tokenInEnv || reflect.ValueOf(c).Field(s.field).String() != "" {
			continue
		}
		other := ""
		if s.flag == "oxide-token-file" {
			other = ", or put the token into OXIDE_TOKEN"
		}
		p.addMissing(s.label(), "is required%s; set --%s or %s%s", modes, s.flag, s.env, other)
	}
}

// rackSettings are the settings of a rack: their keys in an entry of the file, and their flags for a single rack.
var rackSettings = []struct {
	key, flag string
	// missing is what to do if an entry of the file lacks the setting. It is empty for an optional one.
	missing string
	of      func(Rack) string
	check   func(value string) error
}{
	{"host", "--oxide-host", "write https://name", func(r Rack) string { return r.Host }, valid(hostURL)},
	{
		"tokenFile", "--oxide-token-file", "name the file with this rack's API token",
		func(r Rack) string { return r.TokenFile }, valid(readToken),
	},
	{
		"project", "--oxide-project", "set the name or ID of the project that holds the disks",
		func(r Rack) string { return r.Project }, checkProject,
	},
	{"caFile", "--oxide-ca-file", "", func(r Rack) string { return r.CAFile }, valid(ReadCAs)},
}

// valid makes a check of a function that parses.
func valid[T any](parse func(string) (T, error)) func(string) error {
	return func(value string) error {
		_, err := parse(value)
		return err
	}
}

// check checks the settings of a rack: an entry of the file, whose keys begin with key, or the rack of the flags.
func (r Rack) check(p *Problems, key string) {
	for _, s := range rackSettings {
		label, value := s.flag, s.of(r)
		if key != "" {
			label = key + s.key
		}
		switch {
		case value != "":
			if err := s.check(value); err != nil {
				p.add(label, "%v", err)
			}
		case key != "" && s.missing != "": // [Config.checkRequired] looks at the flags
			p.add(label, "is required; %s", s.missing)
		}
	}
}

// checkRacks checks the racks that the controller serves: the entries of the file, or the rack of the flags.
func (c Config) checkRacks(p *Problems) {
	flat := c.flatRack()
	if len(c.Racks) == 0 {
		if !c.Mode.Controller() {
			return
		}
		flat.check(p, "")
		if err := checkToken(c.OxideToken.Reveal()); err != nil && !c.OxideToken.Empty() && c.OxideTokenFile == "" {
			p.add("--oxide-token-file", "OXIDE_TOKEN %v", err)
		}
		return
	}
	names, projects := map[string]int{}, map[string]int{}
	for i, rack := range c.Racks {
		key := fmt.Sprintf("racks[%d].", i)
		if err := metadata.CheckRack(rack.Name); err != nil {
			p.add(key+"name", "%v", err)
		} else if first, twice := names[rack.Name]; twice {
			p.add(key+"name", "%q is the name of racks[%d] too; names tell racks apart in the topology", rack.Name, first)
		} else {
			names[rack.Name] = i
		}
		if c.Mode.Controller() {
			rack.check(p, key)
			rack.checkProjectTwice(p, i, projects)
		}
	}
	if _, known := names[c.Rack]; c.RackGiven && !known {
		p.add("--rack", "%s is not the name of any entry of racks", quote(c.Rack))
	}
	for _, s := range rackSettings {
		if s.of(flat) != "" {
			p.add(s.flag, "cannot be combined with racks in the file; remove one of the two")
		}
	}
}

// checkProjectTwice rejects a project that an entry before this one has: each of its volumes would be listed twice.
func (r Rack) checkProjectTwice(p *Problems, index int, projects map[string]int) {
	host, err := hostURL(r.Host)
	if err != nil || checkProject(r.Project) != nil {
		return
	}
	project := host + " " + r.Project
	if first, twice := projects[project]; twice {
		p.add(fmt.Sprintf("racks[%d].project", index), "is %q on %s, which racks[%d] has already; leave one of the two",
			r.Project, host, first)
		return
	}
	projects[project] = index
}

// checkNode checks the settings of a node and of attaching.
func (c Config) checkNode(p *Problems) {
	oneOf(p, "--attach-mode", c.AttachMode, AttachHot, AttachRestart)
	if c.RestartsPlanned() {
		c.checkRestart(p)
	}
	c.checkPlanning(p)
	if _, err := c.PoweroffSignal(); err != nil {
		p.add("--restart-poweroff", "%v", err)
	}
	between(p, "--max-disks", c.MaxDisks, minMaxDisks, maxMaxDisks)
	if most := c.MaxDisks - minMaxDisks; c.ReserveDisks < 0 || c.ReserveDisks > max(0, most) {
		p.add("--reserve-disks",
			"%d is not between 0 and %d: of --max-disks %d, one is the boot disk and one must be left for a volume",
			c.ReserveDisks, max(0, most), c.MaxDisks)
	}
	c.checkIdentity(p)
	checkAbsolute(p, "--state-dir", c.StateDir)
	between(p, "--luks-memory", c.LUKSMemory, minLUKSMemory, maxLUKSMemory)
	if c.BlankScanLimit < 0 {
		p.add("--blank-scan-limit", "%d is negative", c.BlankScanLimit)
	}
	if c.DeviceTimeout <= 0 {
		p.add("--device-timeout", "%s is not positive", c.DeviceTimeout)
	}
	if c.DetachGrace < 0 {
		p.add("--detach-grace", "%s is negative", c.DetachGrace)
	}
	checkAbsolute(p, "--dev-root", c.DevRoot)
	checkAbsolute(p, "--boot-id-file", c.BootIDFile)
	c.checkKubelet(p)
	c.checkTaint(p)
}

func (c Config) checkTaint(p *Problems) {
	switch {
	case c.StartupTaint == "" || !c.Mode.Node():
	case !labelNames.MatchString(c.StartupTaint):
		p.add("--startup-taint", "%s is not the key of a taint, such as csi.oxide.computer/agent-not-ready",
			quote(c.StartupTaint))
	case c.NodeName == "":
		p.add("--startup-taint", "needs the Node's name; set OXIDE_CSI_NODE_NAME from spec.nodeName by the downward API")
	}
}

// checkRestart checks that a controller can reach the nodes whose restarts it plans.
func (c Config) checkRestart(p *Problems) {
	if c.Mode.Controller() && (c.RestartShutdown == ShutdownGuest || c.RestartShutdown == ShutdownDrain) &&
		c.Orchestrator() == "" {
		p.add("--restart-shutdown",
			"%s needs Kubernetes or Nomad to reach the nodes; run under one of them, or use hard, which cuts the power",
			quote(c.RestartShutdown))
	}
	if c.Mode.Node() && c.Orchestrator() == MetadataKubernetes && c.NodeName == "" && c.Metadata != MetadataKubernetes {
		p.add("--node-name",
			"is required with --attach-mode=%s in Kubernetes; set OXIDE_CSI_NODE_NAME from spec.nodeName by the downward API",
			c.AttachMode)
	}
}

// checkKubelet checks how a node registers with the kubelet.
func (c Config) checkKubelet(p *Problems) {
	if c.KubeletRegistrationDir == "" {
		return
	}
	checkAbsolute(p, "--kubelet-registration-dir", c.KubeletRegistrationDir)
	if length := len(filepath.Join(c.KubeletRegistrationDir, kubeletSocket)); length > maxSocketPath {
		p.add("--kubelet-registration-dir",
			"the path of the socket in it has %d bytes, more than the limit of %d; use a shorter path", length, maxSocketPath)
	}
}

// validateIdentity is [Config.Validate] for [LoadIdentity].
func (c Config) validateIdentity() Problems {
	var p Problems
	c.checkTokens(&p)
	c.checkRackName(&p)
	c.checkIdentity(&p)
	c.checkLog(&p)
	return p
}

// validateOperator is [Config.Validate] for [LoadOperator].
func (c Config) validateOperator() Problems {
	p := c.validateIdentity()
	oneOf(&p, "--mode", c.Mode, ModeController, ModeNode, ModeAll)
	c.Endpoint = "/unused" // required only to serve
	when := requiredInModes
	if c.OxideHost != "" || len(c.Racks) > 0 {
		when = "with the host of a rack" // which makes a command ask it, whatever the mode
	}
	c.checkRequired(&p, when)
	c.checkRacks(&p)
	c.checkClusterID(&p)
	return p
}

// checkMetadata checks that the source of a node's identity has what it needs.
func (c Config) checkMetadata(p *Problems) {
	oneOf(p, "--metadata", c.Metadata,
		MetadataAuto, MetadataStatic, MetadataGuest, MetadataKubernetes, MetadataNomad, MetadataNone)
	given := c.InstanceID != "" || c.MetadataFile != ""
	switch {
	case c.Metadata == MetadataNone && c.Mode.Node():
		p.add("--metadata", "none is only for mode controller: a node must know its instance; use auto")
	case c.Metadata == MetadataNone && given:
		p.add("--metadata", "none cannot be combined with --instance-id (OXIDE_INSTANCE_ID) or --metadata-file "+
			"(OXIDE_CSI_METADATA_FILE); remove one of them")
	case c.Metadata == MetadataStatic && c.Mode.Node() && !given:
		p.add("--metadata", "static needs --instance-id (OXIDE_INSTANCE_ID) or --metadata-file (OXIDE_CSI_METADATA_FILE); "+
			"set one of them, or use auto")
	case c.Metadata == MetadataKubernetes && c.Mode.Node() && c.NodeName == "":
		p.add("--node-name",
			"is required with --metadata=kubernetes; set OXIDE_CSI_NODE_NAME from spec.nodeName by the downward API")
	}
}

// checkIdentity checks the settings of a node's identity.
func (c Config) checkIdentity(p *Problems) {
	c.checkMetadata(p)
	if _, err := metadata.ParseInstanceID(c.InstanceID); err != nil && c.InstanceID != "" {
		p.add("--instance-id", "%v", err)
	}
	if c.NodeName != "" && !nodeNames.MatchString(c.NodeName) {
		p.add("--node-name", "%s is not the name of a Kubernetes Node (a-z, 0-9, '-' and '.')", quote(c.NodeName))
	}
	if !labelNames.MatchString(c.RackLabel) {
		p.add("--rack-label", "%s is not the name of a Kubernetes label, such as example.com/rack", quote(c.RackLabel))
	}
	checkAbsolute(p, "--sys-root", c.SysRoot)
}

// checkRackName checks the name of this rack in the topology.
func (c Config) checkRackName(p *Problems) {
	if err := metadata.CheckRack(c.Rack); err != nil {
		p.add("--rack", "%v", err)
	}
}

// checkServing checks the settings of diagnostics.
func (c Config) checkServing(p *Problems) {
	if c.HTTPEndpoint != "" {
		_, port, err := net.SplitHostPort(c.HTTPEndpoint)
		if _, perr := strconv.ParseUint(port, 10, 16); err != nil || perr != nil {
			p.add("--http-endpoint", "%s is not host:port; write 127.0.0.1:9808, or :9808 for every address",
				quote(c.HTTPEndpoint))
		}
	} else if c.Pprof {
		p.add("--pprof", "needs --http-endpoint")
	}
	c.checkLog(p)
}

func (c Config) checkLog(p *Problems) {
	oneOf(p, "--log-format", c.LogFormat, LogText, LogJSON)
}

// checkProject accepts the names and IDs of a project that the rack's API accepts.
func checkProject(project string) error {
	if _, err := projectRef(project); err != nil || len(project) > maxNameBytes {
		return fmt.Errorf("%s is neither an Oxide name (a-z, 0-9 and '-', beginning with a letter, at most 63) nor an ID",
			quote(project))
	}
	return nil
}

// oneOf rejects a value that is not known.
func oneOf[T ~string](p *Problems, flag string, value T, known ...T) {
	if !slices.Contains(known, value) {
		names := strings.ReplaceAll(strings.Trim(fmt.Sprint(known), "[]"), " ", ", ")
		p.add(flag, "%s is not one of %s", quote(string(value)), names)
	}
}

// between rejects a value outside of the bounds.
func between[T cmp.Ordered](p *Problems, flag string, value, least, most T) {
	if value < least || value > most {
		p.add(flag, "%v is not between %v and %v", value, least, most)
	}
}

func checkAbsolute(p *Problems, flag, path string) {
	if !filepath.IsAbs(path) || strings.ContainsRune(path, 0) {
		p.add(flag, "%s is not an absolute path", quote(path))
	}
}

// quote quotes a user's value for an error, and shortens it.
func quote(value string) string {
	const limit = 100
	if len(value) > limit {
		return fmt.Sprintf("%q and %d more bytes", value[:limit], len(value)-limit)
	}
	return fmt.Sprintf("%q", value)
}
