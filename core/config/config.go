// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package config is the plugin's configuration: one struct, the sources of its values, and the checks of them.
//
// A value comes from the last of these that sets it: the default, the YAML file, the environment, the command line.
// [Load] reads all four. It returns a valid [Config], or all [Problems] at once. Nothing else in the plugin reads an
// environment variable or a flag.
//
// The tags of [Config] are the only description of a setting. Flags, environment variables, keys of the file, the text
// of --help and docs/reference/configuration.md are made from them. To add a setting, add a field to its group, a rule
// to [Config.Validate], and the rows that the tests demand. Keep the number of settings small: derive a value that
// follows from the orchestrator, and hide a setting that only tests or orchestrators set.
package config

import (
	"log/slog"
	"path/filepath"
	"time"
)

// Config is the configuration of one process. Only [Load] makes a Config that is ready for use. Printing it shows no
// token.
//
// The tags of a setting:
//
//   - koanf is the key in the file and in the merged layers; flag and env are the names of the flag and the variable.
//   - default is parsed like a value of a user. derived describes a default that depends on the orchestrator, see
//     [loader.derive].
//   - required is "always", or "controller" for modes controller and all.
//   - file "no" keeps the key out of the file. use "identity" adds the setting to [LoadIdentity] and [LoadOperator],
//     use "operator" only to the latter.
//   - help is the text of --help and of the reference. group is the heading there, for this setting and those after it.
//     hidden "yes" keeps the setting out of both: an orchestrator or a test sets it.
type Config struct {
	// Endpoint is the absolute path of the unix socket, at most 107 bytes.
	Endpoint string `group:"Serving" koanf:"endpoint" flag:"endpoint" env:"CSI_ENDPOINT" required:"always" help:"unix socket on which CSI is served: unix:///csi/csi.sock or an absolute path, at most 107 bytes"`
	// Mode says which CSI services are served.
	Mode Mode `koanf:"mode" flag:"mode" env:"OXIDE_CSI_MODE" required:"always" use:"operator" help:"CSI services to serve: controller, node or all; controller and all need the rack's API token"`
	// ConfigFile is the YAML file that was read, empty if there is none.
	ConfigFile string `koanf:"config" flag:"config" env:"OXIDE_CSI_CONFIG" file:"no" use:"identity" help:"YAML file with any of these settings; racks can be set only there"`
	// StateDir is an absolute path.
	StateDir string `koanf:"stateDir" flag:"state-dir" env:"OXIDE_CSI_STATE_DIR" default:"/var/lib/oxide-csi" use:"operator" help:"directory in which a node records its work on volumes; it must survive reboots (node)"`

	// OxideHost is the base URL of the rack's API, without a path. See [Config.RackList].
	OxideHost string `group:"Rack" koanf:"oxideHost" flag:"oxide-host" env:"OXIDE_HOST" required:"controller" use:"operator" help:"URL of the rack's API, such as https://silo.sys.example.com; https if it has no scheme (controller)"`
	// OxideProject is the name or ID of the project that holds the disks.
	OxideProject string `koanf:"oxideProject" flag:"oxide-project" env:"OXIDE_PROJECT" required:"controller" use:"operator" help:"name or ID of the project that holds the disks (controller)"`
	// OxideTokenFile is the path of the file with the API token.
	OxideTokenFile string `koanf:"oxideTokenFile" flag:"oxide-token-file" env:"OXIDE_TOKEN_FILE" required:"controller" use:"operator" help:"file with the API token, read again when it changes; OXIDE_TOKEN is used if empty (controller)"`
	// OxideToken is the API token from the environment; empty where a file is named.
	OxideToken Token `koanf:"oxideToken" env:"OXIDE_TOKEN" file:"no" help:"the API token itself, for a process without a token file; a new token needs a restart of the plugin. It has no flag (controller)"`
	// OxideCAFile is the path of a file with PEM certificates, empty for those that the system trusts; see [ReadCAs].
	OxideCAFile string `koanf:"oxideCAFile" flag:"oxide-ca-file" env:"OXIDE_CSI_CA_FILE" use:"operator" help:"PEM file with the only CA certificates to trust for the rack, read again when it changes; the system's CAs if empty (controller)"`
	// Racks are the entries of the file; see [Config.RackList] for what is served.
	Racks []Rack `koanf:"racks" help:"list of racks to serve, each {name, host, tokenFile, project, caFile}, instead of the settings of one rack above; caFile is optional"`
	// ClusterID tells apart clusters that share a project. It is part of the name of every disk.
	ClusterID string `koanf:"clusterID" flag:"cluster-id" env:"OXIDE_CSI_CLUSTER_ID" required:"controller" use:"operator" help:"ID that tells this cluster apart from others in the same project: 1 to 63 of a-z, 0-9 and '-'. It must never change"`
	// Rack is the rack's name in the topology. RackGiven is true if an operator set it. Then it overrides the name that a
	// metadata provider finds.
	Rack      string `koanf:"rack" flag:"rack" env:"OXIDE_RACK" default:"default" use:"identity" help:"name of this rack in the topology. It must never change"`
	RackGiven bool

	// Metadata names the provider that says which instance this is.
	Metadata string `group:"Node identity" koanf:"metadata" flag:"metadata" env:"OXIDE_CSI_METADATA" default:"auto" use:"identity" help:"source of a node's instance ID and rack: static, guest, kubernetes, nomad, auto (every source that may know them), or none (a controller outside the rack)"`
	// InstanceID is lower case with hyphens, or empty.
	InstanceID string `koanf:"instanceID" flag:"instance-id" env:"OXIDE_INSTANCE_ID" use:"identity" help:"UUID of the instance that this process runs in; it overrides every other source"`
	// MetadataFile is the env file of the static provider. It need not exist yet.
	MetadataFile string `koanf:"metadataFile" flag:"metadata-file" env:"OXIDE_CSI_METADATA_FILE" use:"identity" help:"file with lines OXIDE_INSTANCE_ID= and OXIDE_RACK=, read again when it changes"`
	// SysRoot is an absolute path.
	SysRoot string `hidden:"yes" koanf:"sysRoot" flag:"sys-root" env:"OXIDE_CSI_SYS_ROOT" default:"/sys" use:"identity" help:"path of the host's /sys as the plugin sees it"`

	// AttachMode is AttachHot or AttachRestart.
	AttachMode string `group:"Attaching" koanf:"attachMode" flag:"attach-mode" env:"OXIDE_CSI_ATTACH_MODE" default:"hot" use:"operator" help:"how disks are attached to a running instance: hot attaches at once; restart plans and carries out restarts of instances (docs/explanation/racks-without-hotplug.md)"`
	// MaxDisks is how many disks an instance takes, the boot disk included.
	MaxDisks int `koanf:"maxDisks" flag:"max-disks" env:"OXIDE_CSI_MAX_DISKS" default:"8" use:"operator" help:"number of disks that an instance can have, its boot disk included, 2 to 64: 8 on every rack, 12 on racks from release 18 on"`
	// ReserveDisks are not offered for volumes.
	ReserveDisks int `koanf:"reserveDisks" flag:"reserve-disks" env:"OXIDE_CSI_RESERVE_DISKS" default:"0" help:"number of disks that a node keeps free for manual attaching, besides those attached already (node)"`
	// DetachGrace is how long a detach from an instance with a guest is delayed.
	DetachGrace time.Duration `koanf:"detachGrace" flag:"detach-grace" env:"OXIDE_CSI_DETACH_GRACE" derived:"60s under Nomad, 0s elsewhere" help:"how long a disk stays attached to a running instance after its volume was unpublished: Nomad asks before the volume is unmounted, Kubernetes afterwards, except for a forced detach and a node that is tainted out-of-service. A volume that returns meanwhile is not detached (controller)"`
	// LUKSMemory is the memory of argon2id.
	LUKSMemory Size `koanf:"luksMemory" flag:"luks-memory" env:"OXIDE_CSI_LUKS_MEMORY" default:"64MiB" help:"memory of argon2id for a new passphrase of an encrypted disk. Each node that opens the disk needs as much (one disk at a time), and its container's memory limit must allow it (node)"`
	// BlankScanLimit bounds how much of a device is read to prove it blank.
	BlankScanLimit Size `koanf:"blankScanLimit" flag:"blank-scan-limit" env:"OXIDE_CSI_BLANK_SCAN_LIMIT" default:"32GiB" help:"largest disk made from a snapshot or image that a node reads completely to prove it blank before formatting (node)"`
	// DeviceTimeout is how long a node waits for an attached disk's device.
	DeviceTimeout time.Duration `hidden:"yes" koanf:"deviceTimeout" flag:"device-timeout" env:"OXIDE_CSI_DEVICE_TIMEOUT" default:"60s" help:"how long a node waits for the device of an attached disk"`
	// DevRoot is an absolute path.
	DevRoot string `hidden:"yes" koanf:"devRoot" flag:"dev-root" env:"OXIDE_CSI_DEV_ROOT" default:"/dev" use:"operator" help:"path of the host's /dev as the plugin sees it"`
	// RestartShutdown is ShutdownGuest, ShutdownDrain or ShutdownHard.
	RestartShutdown string `koanf:"restartShutdown" flag:"restart-shutdown" env:"OXIDE_CSI_RESTART_SHUTDOWN" default:"guest" help:"how a guest is stopped for a planned restart: guest, by its node plugin; drain, as guest, after its work has moved to other nodes; hard, by the rack, which cuts the power (controller)"`
	// RestartMaxDown is how many instances of a rack may be down at once for planned restarts.
	RestartMaxDown int `koanf:"restartMaxDown" flag:"restart-max-down" env:"OXIDE_CSI_RESTART_MAX_DOWN" default:"1" help:"number of instances of a rack that may be down at once for planned restarts, 1 to 16 (controller)"`
	// RestartHaltTimeout is how long a guest may take to halt, and a drain.
	RestartHaltTimeout time.Duration `koanf:"restartHaltTimeout" flag:"restart-halt-timeout" env:"OXIDE_CSI_RESTART_HALT_TIMEOUT" default:"2m" help:"how long a drain may take before the restart is cancelled, and how long a guest may take to halt before it is reported as hanging (controller)"`
	// RestartHours is what [Config.RestartTimes] reads.
	RestartHours string `koanf:"restartHours" flag:"restart-hours" env:"OXIDE_CSI_RESTART_HOURS" help:"times in UTC at which planned restarts may begin, such as \"Sat,Sun 01:00-05:00\" or \"Mon-Fri 22:00-04:00, Sun 00:00-24:00\"; any time if empty (controller)"`
	// RestartPoweroff is what [Config.PoweroffSignal] reads.
	RestartPoweroff string `koanf:"restartPoweroff" flag:"restart-poweroff" env:"OXIDE_CSI_RESTART_POWEROFF" default:"systemd" help:"how a node powers off its guest for a planned restart: systemd, over D-Bus, or signal:NAME to the guest's first process, such as signal:SIGUSR2 for busybox (node)"`
	// RestartWindow is how long attaches to an instance are collected.
	RestartWindow time.Duration `hidden:"yes" koanf:"restartWindow" flag:"restart-window" env:"OXIDE_CSI_RESTART_WINDOW" default:"10s" help:"how long attaches to an instance are collected before one restart for all of them, from the first attach on: up to 60s"`
	// RestartCoolDown is how long an instance is not restarted again.
	RestartCoolDown time.Duration `koanf:"restartCoolDown" flag:"restart-cool-down" env:"OXIDE_CSI_RESTART_COOL_DOWN" default:"5m" help:"how long an instance is left running before a planned restart, and after a refused one; 0s for not at all (controller)"`
	// RestartWait is how long an RPC waits.
	RestartWait time.Duration `hidden:"yes" koanf:"restartWait" flag:"restart-wait" env:"OXIDE_CSI_RESTART_WAIT" derived:"100s in Kubernetes, 0s elsewhere" help:"how long ControllerPublishVolume waits for a planned restart before it returns an error that says so: up to 10m"`
	// BootIDFile is an absolute path.
	BootIDFile string `hidden:"yes" koanf:"bootIDFile" flag:"boot-id-file" env:"OXIDE_CSI_BOOT_ID_FILE" default:"/proc/sys/kernel/random/boot_id" help:"file whose content changes with each boot of the guest, by which a node sees that it was restarted"`

	// NodeName is the name of the Kubernetes Node.
	NodeName string `group:"Kubernetes" koanf:"nodeName" flag:"node-name" env:"OXIDE_CSI_NODE_NAME" use:"identity" help:"name of the Kubernetes Node that this process runs on, from the downward API; if set, --metadata=auto also asks Kubernetes"`
	// Kubeconfig is the path of a kubeconfig file, or empty.
	Kubeconfig string `koanf:"kubeconfig" flag:"kubeconfig" env:"OXIDE_CSI_KUBECONFIG" use:"identity" help:"kubeconfig file for requests to Kubernetes; the pod's own service account if empty"`
	// RackLabel is the name of a label or annotation of the Node.
	RackLabel string `koanf:"rackLabel" flag:"rack-label" env:"OXIDE_CSI_RACK_LABEL" default:"oxide.computer/rack" use:"identity" help:"label or annotation of the Node that holds the rack's name, such as topology.kubernetes.io/zone"`
	// KubeletRegistrationDir is an absolute path, empty if the plugin does not register itself with a kubelet.
	KubeletRegistrationDir string `koanf:"kubeletRegistrationDir" flag:"kubelet-registration-dir" env:"OXIDE_CSI_KUBELET_REGISTRATION_DIR" use:"operator" help:"path of the kubelet's directory plugins_registry as the plugin sees it, to register there without node-driver-registrar; the kubelet must see the socket at the path of --endpoint (node)"`
	// StartupTaint is the key of a taint of the Node, or empty.
	StartupTaint string `koanf:"startupTaint" flag:"startup-taint" env:"OXIDE_CSI_STARTUP_TAINT" help:"key of a taint that the plugin removes from its Node once the CSINode has the plugin's volume limit, such as csi.oxide.computer/agent-not-ready; needs a node name (node)"`
	// KubernetesHost and KubernetesPort are set by Kubernetes in each pod.
	KubernetesHost string `hidden:"yes" koanf:"kubernetesHost" env:"KUBERNETES_SERVICE_HOST" file:"no" help:"host of the API server"`
	KubernetesPort string `hidden:"yes" koanf:"kubernetesPort" env:"KUBERNETES_SERVICE_PORT" file:"no" help:"port of the API server" default:"443"`

	// NomadTokenFile is the path of a file with a token. NomadToken is used if it is empty.
	NomadTokenFile string `group:"Nomad" koanf:"nomadTokenFile" flag:"nomad-token-file" env:"OXIDE_CSI_NOMAD_TOKEN_FILE" use:"identity" help:"file with the token for the Nomad agent, read for each request because Nomad renews the token; NOMAD_TOKEN is used if empty"`
	// NomadAddress is a URL, or empty.
	NomadAddress string `hidden:"yes" koanf:"nomadAddress" env:"NOMAD_ADDR" file:"no" help:"address of this machine's Nomad client agent"`
	// NomadSocket is the unix:// URL of the task API, which Nomad sets for a task with an identity block.
	NomadSocket string `hidden:"yes" koanf:"nomadSocket" env:"NOMAD_UNIX_ADDR" file:"no" help:"socket of Nomad's task API, used before the address"`
	// NomadToken is set by Nomad for a task with an identity block.
	NomadToken Token `hidden:"yes" koanf:"nomadToken" env:"NOMAD_TOKEN" file:"no" help:"token for the Nomad agent"`
	// For a Nomad agent with TLS: paths, and a name.
	NomadCACert        string `hidden:"yes" koanf:"nomadCACert"        env:"NOMAD_CACERT"          file:"no" help:"file with the CA of a Nomad agent that serves TLS"`
	NomadClientCert    string `hidden:"yes" koanf:"nomadClientCert"    env:"NOMAD_CLIENT_CERT"     file:"no" help:"file with the client certificate for a Nomad agent"`
	NomadClientKey     string `hidden:"yes" koanf:"nomadClientKey"     env:"NOMAD_CLIENT_KEY"      file:"no" help:"file with the key of the client certificate"`
	NomadTLSServerName string `hidden:"yes" koanf:"nomadTLSServerName" env:"NOMAD_TLS_SERVER_NAME" file:"no" help:"name in the Nomad agent's certificate, if it differs from the address"`
	// NomadAllocation is set by Nomad for every task. It says that Nomad runs this process, not how to reach an agent.
	NomadAllocation string `hidden:"yes" koanf:"nomadAllocation" env:"NOMAD_ALLOC_ID" file:"no" help:"ID of the allocation that this process is part of"`

	// HTTPEndpoint is host:port, empty for off.
	HTTPEndpoint string     `group:"Diagnostics" koanf:"httpEndpoint" flag:"http-endpoint" env:"OXIDE_CSI_HTTP_ENDPOINT" use:"operator" help:"host:port on which /livez, /readyz and /metrics are served; off if empty"`
	LogLevel     slog.Level `                    koanf:"logLevel"     flag:"log-level"     env:"OXIDE_CSI_LOG_LEVEL"     use:"identity" help:"least level of log lines on stderr: debug, info, warn or error"           default:"info"`
	// LogFormat is LogText or LogJSON.
	LogFormat string `koanf:"logFormat" flag:"log-format" env:"OXIDE_CSI_LOG_FORMAT" default:"text" use:"identity" help:"format of log lines: text or json"`
	// Pprof adds /debug/pprof to the HTTP endpoint.
	Pprof bool `hidden:"yes" koanf:"pprof" flag:"pprof" env:"OXIDE_CSI_PPROF" default:"false" help:"serve /debug/pprof on the HTTP endpoint as well"`
}

// Orchestrator is the orchestrator that can carry messages between controller and nodes: MetadataKubernetes,
// MetadataNomad or empty.
func (c Config) Orchestrator() string {
	switch {
	case c.Metadata == MetadataKubernetes, c.Metadata == MetadataNomad:
		return c.Metadata
	case c.KubernetesHost != "" || c.Kubeconfig != "":
		return MetadataKubernetes
	case c.NomadAddress != "" || c.NomadSocket != "":
		return MetadataNomad
	}
	return ""
}

// RestartsPlanned reports whether restarts of instances are planned.
func (c Config) RestartsPlanned() bool { return c.AttachMode == AttachRestart }

// kubeletSocket is the socket's name in KubeletRegistrationDir. node-driver-registrar uses the same name. So an
// operator notices if both register the same plugin.
const kubeletSocket = "csi.oxide.computer-reg.sock"

// KubeletSocket is the path of the socket for registering with the kubelet.
// It is empty if the plugin does not register.
func (c Config) KubeletSocket() string {
	if c.KubeletRegistrationDir == "" || !c.Mode.Node() {
		return ""
	}
	return filepath.Join(c.KubeletRegistrationDir, kubeletSocket)
}

// Mode says which CSI services a process serves. Identity is always served.
type Mode string

// The modes.
const (
	ModeController Mode = "controller"
	ModeNode       Mode = "node"
	ModeAll        Mode = "all"
)

// Controller reports whether the controller service is served.
func (m Mode) Controller() bool { return m == ModeController || m == ModeAll }

// Node reports whether the node service is served.
func (m Mode) Node() bool { return m == ModeNode || m == ModeAll }

// Values of AttachMode, RestartShutdown, LogFormat and Metadata.
const (
	AttachHot     = "hot"
	AttachRestart = "restart"

	ShutdownGuest = "guest"
	ShutdownDrain = "drain"
	ShutdownHard  = "hard"

	LogText = "text"
	LogJSON = "json"

	MetadataAuto       = "auto"
	MetadataStatic     = "static"
	MetadataGuest      = "guest"
	MetadataKubernetes = "kubernetes"
	MetadataNomad      = "nomad"
	MetadataNone       = "none"
)

// Rack is one rack that the controller serves.
type Rack struct {
	// Name is the value of the topology segment.
	Name string `koanf:"name"`
	// Host is the base URL of the API, without a path.
	Host string `koanf:"host"`
	// TokenFile is the path of the file with the API token.
	TokenFile string `koanf:"tokenFile"`
	// Project is the name or ID of the project.
	Project string `koanf:"project"`
	// CAFile is the path of a file with PEM certificates, empty for those that the system trusts; see [ReadCAs].
	CAFile string `koanf:"caFile"`
	// Token is used where TokenFile is empty.
	Token Token
}

// RackList returns the racks that the controller serves, in the order of the file. It returns at least one rack in
// modes controller and all, and none in mode node.
func (c Config) RackList() []Rack {
	switch {
	case !c.Mode.Controller():
		return nil
	case len(c.Racks) > 0:
		return c.Racks
	}
	return []Rack{c.flatRack()}
}

// flatRack is the rack of the flags.
func (c Config) flatRack() Rack {
	return Rack{
		Name: c.Rack, Host: c.OxideHost, TokenFile: c.OxideTokenFile, Project: c.OxideProject, CAFile: c.OxideCAFile,
		Token: c.OxideToken,
	}
}
