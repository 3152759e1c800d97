# The node plugin: it finds, formats and mounts disks on each client of a rack. It holds no token of the rack.
#
# It is privileged, which the clients must allow, and volumes with it, and runs wherever the client's metadata names the rack:
#
#   client { meta { "oxide.rack" = "default" } }
#   plugin "docker" { config { allow_privileged = true  volumes { enabled = true } } }
#
# The instance's ID comes from its firmware, the rack from the client's metadata, for which with ACLs on the job's identity
# needs the policy policies/node.policy.hcl.

variable "image" {
  type        = string
  description = "the plugin's image: oxidecomputer/oxide-csi-plugin:<version>, or where you keep it"
}

variable "state_dir" {
  type        = string
  default     = "/var/lib/oxide-csi"
  description = "folder of each client where the plugin keeps what must outlive its restart; it must exist"
}

variable "max_disks" {
  type        = number
  default     = 8
  description = "disks that an instance takes, boot disk included, the same for controller and nodes: 12 on racks from release 18 on"
}

variable "attach_mode" {
  type        = string
  default     = "hot"
  description = "hot; restart, for planned restarts; or plan, which only reports them. The same for controller and nodes; with ACLs on, restart and plan need the policies policies/restart-*"
}

variable "http_address" {
  type        = string
  default     = "127.0.0.1"
  description = "address to serve /livez, /readyz and /metrics on"
}

job "oxide-csi-node" {
  type        = "system"
  datacenters = ["*"]
  priority    = 90

  constraint {
    attribute = "${attr.kernel.name}"
    value     = "linux"
  }

  constraint {
    attribute = "${meta.oxide.rack}"
    operator  = "is_set"
  }

  update {
    max_parallel = 1
  }

  group "node" {
    network {
      port "http" {}
    }

    # By this Nomad has a client that is away for disconnected, and not for down: allocations that wait for it go on waiting.
    disconnect {
      lost_after = "24h"
    }

    # Nothing can be mounted while it is away, and by default a system job waits for 15 s.
    restart {
      attempts = 10
      interval = "5m"
      delay    = "2s"
      mode     = "delay"
    }

    service {
      name     = "oxide-csi-node"
      provider = "nomad"
      address  = var.http_address
      port     = "http"

      check {
        name     = "live"
        type     = "http"
        path     = "/livez"
        interval = "10s"
        timeout  = "5s"

        check_restart {
          limit = 6
          grace = "1m"
        }
      }

      check {
        name     = "ready"
        type     = "http"
        path     = "/readyz"
        interval = "10s"
        timeout  = "5s"
      }
    }

    task "plugin" {
      driver       = "docker"
      user         = "root"
      kill_timeout = "30s"
      kill_signal  = "SIGTERM"

      # Disks come and go while it runs. Nomad mounts the host's /dev by itself.
      config {
        image           = var.image
        network_mode    = "host"
        privileged      = true
        readonly_rootfs = true

        # By which a planned restart powers the guest off.
        volumes = var.attach_mode != "hot" ? ["/run/dbus:/run/dbus:ro"] : []

        mount {
          type   = "bind"
          source = var.state_dir
          target = "/var/lib/oxide-csi"
        }
      }

      # NOMAD_UNIX_ADDR and NOMAD_TOKEN, to ask the client for its metadata.
      identity {
        env = true
      }

      # CSI_ENDPOINT comes from Nomad.
      env {
        OXIDE_CSI_MODE          = "node"
        OXIDE_CSI_MAX_DISKS     = var.max_disks
        OXIDE_CSI_ATTACH_MODE   = var.attach_mode
        OXIDE_CSI_HTTP_ENDPOINT = "${var.http_address}:${NOMAD_PORT_http}"

        # A soft limit for Go's collector: the rest of the task's memory is for mkfs and fsck.
        GOMEMLIMIT = "64MiB"
      }

      # Until the plugin knows who it is, it is not healthy, and a restart would mend nothing.
      csi_plugin {
        id             = "oxide"
        type           = "node"
        mount_dir      = "/csi"
        health_timeout = "10m"
      }

      resources {
        cpu    = 100
        memory = 256
      }
    }
  }
}
