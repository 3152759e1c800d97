// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package config is the plugin's configuration: one struct, where its values
// come from, and what is wrong with them.
//
// A value is taken from the last of these that has one: the default, the YAML
// file, the environment, the command line. [Load] reads all four, and returns
// either a [Config] that holds in every respect or all [Problems] at once.
// Nothing else in the plugin reads an environment variable or a flag.
//
// The tags of [Config] are the one place where a setting is described: flags,
// environment variables, keys of the file, the text of --help and
// docs/reference/configuration.md are all made from them. To add a setting, add a field,
// its rule in [Config.Validate], and its rows in the tests, which ask for them.
package config

import (
	"log/slog"
	"path/filepath"
	"time"
)

// Config is the configuration of one process. Only [Load] makes one that is
// ready for use. Printing it shows no token.
//
// Tags: koanf is the key in the file and in the merged layers; flag and env are
// the other two names; default is text, read as if a user had written it;
// required is "always", or "controller" for modes controller and all; file "no"
// keeps a key out of the file; use "identity" makes a setting one of [LoadIdentity]
// too; help is one or two sentences.
type Config struct {
	// Endpoint is the absolute path of the unix socket, at most 107 bytes.
	Endpoint string `koanf:"endpoint" flag:"endpoint" env:"CSI_ENDPOINT" required:"always" help:"unix socket to serve CSI on: unix:///csi/csi.sock or an absolute path, at most 107 bytes"`
	// Mode says which CSI services are served.
	Mode Mode `koanf:"mode" flag:"mode" env:"OXIDE_CSI_MODE" default:"all" help:"services to serve: controller, node or all"`
	// ConfigFile is the YAML file that was read, empty if there is none.
	ConfigFile string `koanf:"config" flag:"config" env:"OXIDE_CSI_CONFIG" file:"no" use:"identity" help:"YAML file with any of these settings, and the only place for racks"`

	// OxideHost is the base URL of the rack's API, without a path. See [Config.RackList].
	OxideHost string `koanf:"oxideHost" flag:"oxide-host" env:"OXIDE_HOST" required:"controller" help:"the rack's API: https://silo.sys.example.com; without a scheme it is https. Ignored in mode node"`
	// OxideProject is the name or ID of the project that holds the disks.
	OxideProject string `koanf:"oxideProject" flag:"oxide-project" env:"OXIDE_PROJECT" required:"controller" help:"name or ID of the project that the disks live in. Ignored in mode node"`
	// OxideTokenFile is the path of the file with the API token.
	OxideTokenFile string `koanf:"oxideTokenFile" flag:"oxide-token-file" env:"OXIDE_TOKEN_FILE" required:"controller" help:"file with the API token, read again when it changes; OXIDE_TOKEN serves where no file is named. Ignored in mode node"`
	// OxideToken is the API token from the environment; empty where a file is named.
	OxideToken Token `koanf:"oxideToken" env:"OXIDE_TOKEN" file:"no" help:"the API token itself, for where no file can be had: it does not follow a rotation. There is no flag for it. Ignored in mode node"`
	// OxideCAFile is the path of a file with PEM certificates, empty for those that the system trusts; see [ReadCAs].
	OxideCAFile string `koanf:"oxideCAFile" flag:"oxide-ca-file" env:"OXIDE_CSI_CA_FILE" help:"PEM file with the certificates of the CA that signed the rack's; it is read at start, and nothing else is trusted then. Ignored in mode node"`
	// Racks are the entries of the file; see [Config.RackList] for what is served.
	Racks []Rack `koanf:"racks" help:"racks to serve, a list of {name, host, tokenFile, project, caFile}, instead of the settings of one rack above; caFile may be left out"`

	// ClusterID tells apart clusters that share a project. It is part of every
	// disk's name.
	ClusterID string `koanf:"clusterID" flag:"cluster-id" env:"OXIDE_CSI_CLUSTER_ID" required:"controller" help:"tells apart clusters that share a project, for ever: 1 to 63 of a-z, 0-9 and '-'"`
	// Rack is the rack's name in the topology. RackGiven is true if somebody
	// wrote it, so that a name found by a metadata provider may not replace it.
	Rack      string `koanf:"rack" flag:"rack" env:"OXIDE_RACK" default:"default" use:"identity" help:"this rack's name in the topology, for ever"`
	RackGiven bool

	// AttachMode is AttachHot or AttachRestart.
	AttachMode string `koanf:"attachMode" flag:"attach-mode" env:"OXIDE_CSI_ATTACH_MODE" default:"hot" help:"how disks are attached to a running instance: hot tries, and says what to do where the rack refuses; restart plans restarts of instances (docs/explanation/racks-without-hotplug.md)"`
	// RestartPolicy is RestartNever, RestartPlan or RestartAllow.
	RestartPolicy string `koanf:"restartPolicy" flag:"restart-policy" env:"OXIDE_CSI_RESTART_POLICY" default:"allow" help:"whether instances may be restarted with --attach-mode=restart: never, plan, which only tells what would be restarted, or allow. Ignored in mode node"`
	// RestartShutdown is ShutdownGuest, ShutdownDrain or ShutdownHard.
	RestartShutdown string `koanf:"restartShutdown" flag:"restart-shutdown" env:"OXIDE_CSI_RESTART_SHUTDOWN" default:"guest" help:"how a guest goes down for a planned restart: guest, where its node plugin powers it off, drain, where its work is moved to other nodes before, or hard, a stop by the rack, which is a power cut. Ignored in mode node"`
	// RestartWindow is how long wishes are collected.
	RestartWindow time.Duration `koanf:"restartWindow" flag:"restart-window" env:"OXIDE_CSI_RESTART_WINDOW" default:"10s" help:"how long attaches to an instance are collected from the first on, before it is restarted for all of them: up to 60s. Ignored in mode node"`
	// RestartMaxDown is how many instances of a rack may be down at once for planned restarts.
	RestartMaxDown int `koanf:"restartMaxDown" flag:"restart-max-down" env:"OXIDE_CSI_RESTART_MAX_DOWN" default:"1" help:"instances of a rack that may be down at once for planned restarts, 1 to 16. Ignored in mode node"`
	// RestartCoolDown is how long an instance is left alone.
	RestartCoolDown time.Duration `koanf:"restartCoolDown" flag:"restart-cool-down" env:"OXIDE_CSI_RESTART_COOL_DOWN" default:"5m" help:"how long an instance is left alone after it was started, or after it refused a planned restart. Ignored in mode node"`
	// RestartHaltTimeout is how long a guest may take to halt, and a drain.
	RestartHaltTimeout time.Duration `koanf:"restartHaltTimeout" flag:"restart-halt-timeout" env:"OXIDE_CSI_RESTART_HALT_TIMEOUT" default:"2m" help:"how long a node may take to be drained before its restart is given up, and its guest to halt before somebody is called to look at it. Ignored in mode node"`
	// RestartWait is how long an RPC waits.
	RestartWait time.Duration `koanf:"restartWait" flag:"restart-wait" env:"OXIDE_CSI_RESTART_WAIT" default:"0s" help:"how long ControllerPublishVolume waits for a planned restart before it answers that one is planned: 0s under Nomad, which serves nobody else meanwhile; up to 10m. Ignored in mode node"`
	// RestartHours is what [Config.RestartTimes] reads.
	RestartHours string `koanf:"restartHours" flag:"restart-hours" env:"OXIDE_CSI_RESTART_HOURS" help:"times in UTC at which planned restarts may begin, such as \"Sat,Sun 01:00-05:00\" or \"Mon-Fri 22:00-04:00, Sun 00:00-24:00\"; always where empty. Ignored in mode node"`
	// RestartSelf is SelfAuto, SelfNone or the ID of an instance in lower case with hyphens.
	RestartSelf string `koanf:"restartSelf" flag:"restart-self" env:"OXIDE_CSI_RESTART_SELF" default:"auto" help:"instance on which the controller runs, whose restart it leaves to another controller: its UUID, none if it runs elsewhere, or auto, which asks --metadata. Ignored in mode node"`
	// RestartPoweroff is what [Config.PoweroffSignal] reads.
	RestartPoweroff string `koanf:"restartPoweroff" flag:"restart-poweroff" env:"OXIDE_CSI_RESTART_POWEROFF" default:"systemd" help:"how a node powers its guest off for a planned restart: systemd, over D-Bus, or signal:NAME, such as signal:SIGUSR2 for busybox, to the guest's first process. Ignored in mode controller"`
	// RestartDespiteGracefulShutdown is for nodes whose kubelet would end its pods.
	RestartDespiteGracefulShutdown bool `koanf:"restartDespiteGracefulShutdown" flag:"restart-despite-graceful-shutdown" env:"OXIDE_CSI_RESTART_DESPITE_GRACEFUL_SHUTDOWN" default:"false" help:"power a node off for a planned restart even if its kubelet has graceful node shutdown on, which is refused otherwise; the kubelet is not told. Ignored in mode controller"`
	// MaxDisks is how many disks an instance takes, the boot disk included.
	MaxDisks int `koanf:"maxDisks" flag:"max-disks" env:"OXIDE_CSI_MAX_DISKS" default:"8" help:"disks an instance takes, boot disk included, 2 to 64: 8 holds everywhere, racks from release 18 on take 12"`
	// ReserveDisks are not offered for volumes.
	ReserveDisks int `koanf:"reserveDisks" flag:"reserve-disks" env:"OXIDE_CSI_RESERVE_DISKS" default:"0" help:"disks of an instance that a node keeps free for disks attached by hand, besides those that are attached already"`

	// Metadata names the provider that says which instance this is.
	Metadata string `koanf:"metadata" flag:"metadata" env:"OXIDE_CSI_METADATA" default:"auto" use:"identity" help:"where a node learns its instance ID and rack: static, guest, kubernetes, nomad, or auto, which asks whatever can know"`
	// InstanceID is lower case with hyphens, or empty.
	InstanceID string `koanf:"instanceID" flag:"instance-id" env:"OXIDE_INSTANCE_ID" use:"identity" help:"UUID of the instance this process runs in; wins over every other source"`
	// MetadataFile is the env file of the static provider. It need not exist yet.
	MetadataFile string `koanf:"metadataFile" flag:"metadata-file" env:"OXIDE_CSI_METADATA_FILE" use:"identity" help:"file with lines OXIDE_INSTANCE_ID= and OXIDE_RACK=, read again when it changes"`
	// NodeName is the name of the Kubernetes Node.
	NodeName string `koanf:"nodeName" flag:"node-name" env:"OXIDE_CSI_NODE_NAME" use:"identity" help:"name of the Kubernetes Node this process runs on, from the downward API; where it is given, auto asks Kubernetes"`
	// Kubeconfig is the path of a kubeconfig file, or empty.
	Kubeconfig string `koanf:"kubeconfig" flag:"kubeconfig" env:"OXIDE_CSI_KUBECONFIG" use:"identity" help:"kubeconfig file to ask Kubernetes with; the pod's own service account where empty"`
	// InstanceLabel and RackLabel are names of labels or annotations of the Node.
	InstanceLabel string `koanf:"instanceLabel" flag:"instance-label" env:"OXIDE_CSI_INSTANCE_LABEL" default:"oxide.computer/instance-id" use:"identity" help:"label or annotation of the Node that holds the instance ID, where the Node has no provider ID"`
	RackLabel     string `koanf:"rackLabel"     flag:"rack-label"     env:"OXIDE_CSI_RACK_LABEL"     default:"oxide.computer/rack"        use:"identity" help:"label or annotation of the Node that holds the rack's name, such as topology.kubernetes.io/zone"`
	// KubernetesHost and KubernetesPort are what Kubernetes tells each pod.
	KubernetesHost string `koanf:"kubernetesHost" env:"KUBERNETES_SERVICE_HOST" file:"no" help:"where the API server is; Kubernetes sets it in every pod"`
	KubernetesPort string `koanf:"kubernetesPort" env:"KUBERNETES_SERVICE_PORT" file:"no" help:"the API server's port; Kubernetes sets it in every pod"   default:"443"`
	// NomadAddress is a URL, or empty.
	NomadAddress string `koanf:"nomadAddress" flag:"nomad-address" env:"NOMAD_ADDR" use:"identity" help:"address of this machine's Nomad client agent, http://127.0.0.1:4646 where empty; where it is given, auto asks Nomad"`
	// NomadSocket is the unix:// URL of the task API.
	NomadSocket string `koanf:"nomadSocket" env:"NOMAD_UNIX_ADDR" file:"no" help:"socket of Nomad's task API, asked before the address; Nomad sets it for a task with an identity block, and where it is set, auto asks Nomad"`
	// NomadToken is used where there is no NomadTokenFile.
	NomadToken     Token  `koanf:"nomadToken"     env:"NOMAD_TOKEN"                file:"no" help:"token for the Nomad agent, which Nomad sets for a task with an identity block; there is no flag for it"`
	NomadTokenFile string `koanf:"nomadTokenFile" env:"OXIDE_CSI_NOMAD_TOKEN_FILE"           help:"file with the token for the Nomad agent, read again for each question"                                  flag:"nomad-token-file" use:"identity"`
	// For a Nomad agent with TLS: paths, and a name.
	NomadCACert        string `koanf:"nomadCACert"        env:"NOMAD_CACERT"          help:"file with the CA of a Nomad agent that serves TLS"`
	NomadClientCert    string `koanf:"nomadClientCert"    env:"NOMAD_CLIENT_CERT"     help:"file with the certificate to show to a Nomad agent"`
	NomadClientKey     string `koanf:"nomadClientKey"     env:"NOMAD_CLIENT_KEY"      help:"file with the key of that certificate"`
	NomadTLSServerName string `koanf:"nomadTLSServerName" env:"NOMAD_TLS_SERVER_NAME" help:"name in the Nomad agent's certificate, where it is not that of the address"`

	// KubeletRegistrationDir is an absolute path, empty where no kubelet is to know the plugin, or a sidecar tells it.
	KubeletRegistrationDir string `koanf:"kubeletRegistrationDir" flag:"kubelet-registration-dir" env:"OXIDE_CSI_KUBELET_REGISTRATION_DIR" help:"where the plugin sees the kubelet's folder plugins_registry, to register there without node-driver-registrar. Ignored in mode controller"`
	// KubeletEndpoint is an absolute path.
	KubeletEndpoint string `koanf:"kubeletEndpoint" flag:"kubelet-endpoint" env:"OXIDE_CSI_KUBELET_ENDPOINT" help:"where the kubelet sees the socket of --endpoint: /var/lib/kubelet/plugins/csi.oxide.computer/csi.sock. Needed to register"`

	// StartupTaint is the key of a taint of the Node, or empty.
	StartupTaint string `koanf:"startupTaint" flag:"startup-taint" env:"OXIDE_CSI_STARTUP_TAINT" help:"key of a taint to take off the Kubernetes Node once its CSINode has this plugin's limit of volumes, such as csi.oxide.computer/agent-not-ready; needs a node name. Ignored in mode controller"`

	// HTTPEndpoint is host:port, empty for off.
	HTTPEndpoint string `koanf:"httpEndpoint" flag:"http-endpoint" env:"OXIDE_CSI_HTTP_ENDPOINT" help:"Host:port to serve /livez, /readyz and /metrics on; off where empty"`
	// Pprof adds /debug/pprof to the HTTP endpoint.
	Pprof bool `koanf:"pprof" flag:"pprof" env:"OXIDE_CSI_PPROF" default:"false" help:"serve /debug/pprof on the HTTP endpoint too"`

	// StateDir is an absolute path.
	StateDir string `koanf:"stateDir" flag:"state-dir" env:"OXIDE_CSI_STATE_DIR" default:"/var/lib/oxide-csi" help:"where a node records formatting under way and which volumes its programs work on, and nothing else"`
	// BlankScanLimit bounds how much of a device is read to prove it blank.
	BlankScanLimit Size `koanf:"blankScanLimit" flag:"blank-scan-limit" env:"OXIDE_CSI_BLANK_SCAN_LIMIT" default:"32GiB" help:"largest disk made from a snapshot or image that is read whole to prove it blank before formatting"`
	// DeviceTimeout is how long a node waits for an attached disk's device.
	DeviceTimeout time.Duration `koanf:"deviceTimeout" flag:"device-timeout" env:"OXIDE_CSI_DEVICE_TIMEOUT" default:"60s" help:"how long a node waits for the device of an attached disk"`
	// DetachGrace is how long a detach from a running instance is put off.
	DetachGrace time.Duration `koanf:"detachGrace" flag:"detach-grace" env:"OXIDE_CSI_DETACH_GRACE" default:"0s" help:"how long a detach from a running instance is refused after it was first asked for, so that a slow unmount can end; 60s under Nomad"`

	LogLevel slog.Level `koanf:"logLevel" flag:"log-level" env:"OXIDE_CSI_LOG_LEVEL" default:"info" use:"identity" help:"debug, info, warn or error; logs go to stderr"`
	// LogFormat is LogText or LogJSON.
	LogFormat string `koanf:"logFormat" flag:"log-format" env:"OXIDE_CSI_LOG_FORMAT" default:"text" use:"identity" help:"text or json"`

	// DevRoot and SysRoot are absolute paths.
	DevRoot string `koanf:"devRoot" flag:"dev-root" env:"OXIDE_CSI_DEV_ROOT" default:"/dev" help:"where the host's /dev is seen"`
	SysRoot string `koanf:"sysRoot" flag:"sys-root" env:"OXIDE_CSI_SYS_ROOT" default:"/sys" help:"where the host's /sys is seen" use:"identity"`
	// BootIDFile is an absolute path.
	BootIDFile string `koanf:"bootIDFile" flag:"boot-id-file" env:"OXIDE_CSI_BOOT_ID_FILE" default:"/proc/sys/kernel/random/boot_id" help:"file whose content is another one after each boot of the guest, by which a node tells that a planned restart is over. Ignored in mode controller"`
}

// Orchestrator is which of MetadataKubernetes and MetadataNomad can carry a word between controller and nodes, or empty.
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

// kubeletSocket is the socket's name in KubeletRegistrationDir: the one that node-driver-registrar would use, so that two who
// register the same plugin notice each other.
const kubeletSocket = "csi.oxide.computer-reg.sock"

// KubeletSocket is the path of the socket by which a node's plugin registers with the kubelet, empty where it does not.
func (c Config) KubeletSocket() string {
	if c.KubeletRegistrationDir == "" || !c.Mode.Node() {
		return ""
	}
	return filepath.Join(c.KubeletRegistrationDir, kubeletSocket)
}

// Mode says which CSI services a process serves. Identity is always served.
type Mode string

const (
	ModeController Mode = "controller"
	ModeNode       Mode = "node"
	ModeAll        Mode = "all"
)

// Controller reports whether the controller service is served.
func (m Mode) Controller() bool { return m == ModeController || m == ModeAll }

// Node reports whether the node service is served.
func (m Mode) Node() bool { return m == ModeNode || m == ModeAll }

// Values of AttachMode, Metadata and LogFormat that this build has.
const (
	AttachHot     = "hot"
	AttachRestart = "restart"

	RestartNever = "never"
	RestartPlan  = "plan"
	RestartAllow = "allow"

	ShutdownGuest = "guest"
	ShutdownDrain = "drain"
	ShutdownHard  = "hard"

	SelfAuto = "auto"
	SelfNone = "none"

	LogText = "text"
	LogJSON = "json"

	MetadataAuto       = "auto"
	MetadataStatic     = "static"
	MetadataGuest      = "guest"
	MetadataKubernetes = "kubernetes"
	MetadataNomad      = "nomad"
)

// Rack is one rack that the controller serves.
type Rack struct {
	// Name is the value of the topology segment.
	Name string `koanf:"name"`
	// Host is the base URL of the API, without a path.
	Host string `koanf:"host"`
	// TokenFile is the path of the file with the API token; see [ReadToken].
	TokenFile string `koanf:"tokenFile"`
	// Project is the name or ID of the project.
	Project string `koanf:"project"`
	// CAFile is the path of a file with PEM certificates, empty for those that the system trusts; see [ReadCAs].
	CAFile string `koanf:"caFile"`
	// Token is used where TokenFile is empty.
	Token Token
}

// RackList returns the racks that the controller serves, in the order in which
// they were written: at least one in modes controller and all, none in mode node.
func (c Config) RackList() []Rack {
	switch {
	case !c.Mode.Controller():
		return nil
	case len(c.Racks) > 0:
		return c.Racks
	}
	return []Rack{
		{
			Name:      c.Rack,
			Host:      c.OxideHost,
			TokenFile: c.OxideTokenFile,
			Project:   c.OxideProject,
			CAFile:    c.OxideCAFile,
			Token:     c.OxideToken,
		},
	}
}
