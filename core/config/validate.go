// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package config

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"reflect"
	"regexp"
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
		for _, key := range []struct{ name, value string }{
			{"name", rack.Name}, {"host", rack.Host}, {"project", rack.Project},
		} {
			if looksLikeToken(key.value) {
				p.add(fmt.Sprintf("racks[%d].%s", i, key.name), "%v", errToken)
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
			p.add("--mode", "%s is not one of controller, node, all", quote(string(c.Mode)))
		} else {
			p.addMissing("--mode", "is required; set --mode or OXIDE_CSI_MODE to controller, node or all")
		}
		c.Mode = ModeAll
	}
	c.checkTokens(&p)
	c.checkRequired(&p)
	if _, err := socketPath(c.Endpoint); err != nil && c.Endpoint != "" {
		p.add("--endpoint", "%v", err)
	}
	c.checkRack(&p)
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

// checkRequired adds a problem for every setting that this mode requires and that is not set.
func (c Config) checkRequired(p *Problems) {
	for _, s := range settings() {
		modes := ""
		switch {
		case s.required == "always":
		case s.required == "controller" && c.Mode.Controller():
			modes = " in modes controller and all"
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

// checkRack checks the settings of one rack.
func (c Config) checkRack(p *Problems) {
	if !c.Mode.Controller() || len(c.Racks) > 0 {
		return
	}
	if _, err := hostURL(c.OxideHost); err != nil && c.OxideHost != "" {
		p.add("--oxide-host", "%v", err)
	}
	if err := checkProject(c.OxideProject); err != nil && c.OxideProject != "" {
		p.add("--oxide-project", "%v", err)
	}
	if c.OxideTokenFile != "" {
		if _, err := readToken(c.OxideTokenFile); err != nil {
			p.add("--oxide-token-file", "%v", err)
		}
	} else if !c.OxideToken.Empty() {
		if err := checkToken(c.OxideToken.Reveal()); err != nil {
			p.add("--oxide-token-file", "OXIDE_TOKEN %v", err)
		}
	}
	if _, err := ReadCAs(c.OxideCAFile); err != nil {
		p.add("--oxide-ca-file", "%v", err)
	}
}

// checkRacks checks the entries of the file.
func (c Config) checkRacks(p *Problems) {
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
		if !c.Mode.Controller() {
			continue
		}
		if _, err := hostURL(rack.Host); rack.Host == "" {
			p.add(key+"host", "is required; write https://name")
		} else if err != nil {
			p.add(key+"host", "%v", err)
		}
		if _, err := readToken(rack.TokenFile); rack.TokenFile == "" {
			p.add(key+"tokenFile", "is required; name the file with this rack's API token")
		} else if err != nil {
			p.add(key+"tokenFile", "%v", err)
		}
		if err := checkProject(rack.Project); err != nil {
			p.add(key+"project", "%v", err)
		} else if host, err := hostURL(rack.Host); err == nil {
			// Otherwise each volume of the project would be listed twice.
			if first, twice := projects[host+" "+rack.Project]; twice {
				p.add(key+"project", "is %q on %s, which racks[%d] has already; leave one of the two", rack.Project, host, first)
			} else {
				projects[host+" "+rack.Project] = i
			}
		}
		if _, err := ReadCAs(rack.CAFile); err != nil {
			p.add(key+"caFile", "%v", err)
		}
	}
	if len(c.Racks) == 0 {
		return
	}
	if _, known := names[c.Rack]; c.RackGiven && !known {
		p.add("--rack", "%s is not the name of any entry of racks", quote(c.Rack))
	}
	for _, flat := range []struct{ flag, value string }{
		{"--oxide-host", c.OxideHost}, {"--oxide-project", c.OxideProject}, {"--oxide-token-file", c.OxideTokenFile},
		{"--oxide-ca-file", c.OxideCAFile},
	} {
		if flat.value != "" {
			p.add(flat.flag, "cannot be combined with racks in the file; remove one of the two")
		}
	}
}

// checkNode checks the settings of a node and of attaching.
func (c Config) checkNode(p *Problems) {
	switch c.AttachMode {
	case AttachHot:
	case AttachPlan, AttachRestart:
		c.checkRestart(p)
	default:
		p.add("--attach-mode", "%s is not one of hot, plan, restart", quote(c.AttachMode))
	}
	c.checkPlanning(p)
	if _, err := c.PoweroffSignal(); err != nil {
		p.add("--restart-poweroff", "%v", err)
	}
	if c.MaxDisks < minMaxDisks || c.MaxDisks > maxMaxDisks {
		p.add("--max-disks", "%d is not between %d and %d", c.MaxDisks, minMaxDisks, maxMaxDisks)
	}
	if most := c.MaxDisks - minMaxDisks; c.ReserveDisks < 0 || c.ReserveDisks > max(0, most) {
		p.add(
			"--reserve-disks",
			"%d is not between 0 and %d: of --max-disks %d, one is the boot disk and one must be left for a volume",
			c.ReserveDisks,
			max(0, most),
			c.MaxDisks,
		)
	}
	c.checkIdentity(p)
	checkAbsolute(p, "--state-dir", c.StateDir)
	if c.LUKSMemory < minLUKSMemory || c.LUKSMemory > maxLUKSMemory {
		p.add("--luks-memory", "%s is not between %s and %s", c.LUKSMemory, minLUKSMemory, maxLUKSMemory)
	}
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
	switch {
	case c.StartupTaint == "" || !c.Mode.Node():
	case !labelNames.MatchString(c.StartupTaint):
		p.add(
			"--startup-taint",
			"%s is not the key of a taint, such as csi.oxide.computer/agent-not-ready",
			quote(c.StartupTaint),
		)
	case c.NodeName == "":
		p.add("--startup-taint", "needs the Node's name; set OXIDE_CSI_NODE_NAME from spec.nodeName by the downward API")
	}
}

// checkRestart checks that a controller can reach the nodes whose restarts it plans.
func (c Config) checkRestart(p *Problems) {
	if c.Mode.Controller() && (c.RestartShutdown == ShutdownGuest || c.RestartShutdown == ShutdownDrain) &&
		c.Orchestrator() == "" {
		p.add(
			"--restart-shutdown",
			"%s needs Kubernetes or Nomad to reach the nodes; run under one of them, or use hard, which cuts the power",
			quote(c.RestartShutdown),
		)
	}
	if c.Mode.Node() && c.Orchestrator() == MetadataKubernetes && c.NodeName == "" && c.Metadata != MetadataKubernetes {
		p.add(
			"--node-name",
			"is required with --attach-mode=%s in Kubernetes; set OXIDE_CSI_NODE_NAME from spec.nodeName by the downward API",
			c.AttachMode,
		)
	}
}

// checkKubelet checks how a node registers with the kubelet.
func (c Config) checkKubelet(p *Problems) {
	if c.KubeletRegistrationDir == "" {
		return
	}
	checkAbsolute(p, "--kubelet-registration-dir", c.KubeletRegistrationDir)
	if length := len(filepath.Join(c.KubeletRegistrationDir, kubeletSocket)); length > maxSocketPath {
		p.add(
			"--kubelet-registration-dir",
			"the path of the socket in it has %d bytes, more than the limit of %d; use a shorter path",
			length,
			maxSocketPath,
		)
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
	if !c.Mode.Controller() && !c.Mode.Node() {
		p.add("--mode", "%s is not one of controller, node, all", quote(string(c.Mode)))
	}
	c.Endpoint = "/unused" // required only to serve
	c.checkRequired(&p)
	c.checkRack(&p)
	c.checkRacks(&p)
	c.checkClusterID(&p)
	return p
}

// checkIdentity checks the settings of a node's identity.
func (c Config) checkIdentity(p *Problems) {
	switch c.Metadata {
	case MetadataAuto, MetadataGuest, MetadataNomad:
	case MetadataNone:
		if c.Mode.Node() {
			p.add("--metadata", "none is only for mode controller: a node must know its instance; use auto")
		} else if c.InstanceID != "" || c.MetadataFile != "" {
			p.add(
				"--metadata",
				"none cannot be combined with --instance-id (OXIDE_INSTANCE_ID) or --metadata-file (OXIDE_CSI_METADATA_FILE); remove one of them",
			)
		}
	case MetadataStatic:
		if c.Mode.Node() && c.InstanceID == "" && c.MetadataFile == "" {
			p.add(
				"--metadata",
				"static needs --instance-id (OXIDE_INSTANCE_ID) or --metadata-file (OXIDE_CSI_METADATA_FILE); set one of them, or use auto",
			)
		}
	case MetadataKubernetes:
		if c.Mode.Node() && c.NodeName == "" {
			p.add(
				"--node-name",
				"is required with --metadata=kubernetes; set OXIDE_CSI_NODE_NAME from spec.nodeName by the downward API",
			)
		}
	default:
		p.add("--metadata", "%s is not one of auto, static, guest, kubernetes, nomad, none", quote(c.Metadata))
	}
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
			p.add(
				"--http-endpoint",
				"%s is not host:port; write 127.0.0.1:9808, or :9808 for every address",
				quote(c.HTTPEndpoint),
			)
		}
	} else if c.Pprof {
		p.add("--pprof", "needs --http-endpoint")
	}
	c.checkLog(p)
}

func (c Config) checkLog(p *Problems) {
	if c.LogFormat != LogText && c.LogFormat != LogJSON {
		p.add("--log-format", "%s is not one of text, json", quote(c.LogFormat))
	}
}

// checkProject accepts the names and IDs of a project that the rack's API accepts.
func checkProject(project string) error {
	if project == "" {
		return errors.New("is required; set the name or ID of the project that holds the disks")
	}
	if _, err := projectRef(project); err != nil || len(project) > maxNameBytes {
		return fmt.Errorf(
			"%s is neither an Oxide name (a-z, 0-9 and '-', beginning with a letter, at most 63) nor an ID",
			quote(project),
		)
	}
	return nil
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
