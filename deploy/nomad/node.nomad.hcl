# The node plugin: it finds, formats and mounts disks on each client of a rack. It has no token of the rack.
#
# It runs as root on every client whose metadata names the rack:
#
#   client { meta { "oxide.rack" = "default" } }
#
# With docker it is privileged and uses volumes, which the clients must allow:
#
#   plugin "docker" { config { allow_privileged = true  volumes { enabled = true } } }
#
# The instance ID comes from the firmware, the rack from the client's metadata. With ACLs the job's identity needs the
# policy policies/node.policy.hcl to read the metadata.

variable "driver" {
  type        = string
  default     = "raw_exec"
  description = "raw_exec, which runs the program at command; or docker, which runs image"

  validation {
    condition     = contains(["raw_exec", "docker"], var.driver)
    error_message = "The driver must be raw_exec or docker."
  }
}

variable "image" {
  type        = string
  default     = null
  description = "the image, required by docker: oxidecomputer/oxide-csi-plugin:v0.1.0, or its name in your registry"
}

variable "command" {
  type        = string
  default     = "/usr/local/bin/oxide-csi"
  description = "path of the program on each client; not used by docker"
}

variable "data_dir" {
  type        = string
  default     = "/opt/nomad/data"
  description = "data_dir of the clients; with raw_exec, if it is wrong, the plugin gets paths that do not exist"
}

variable "state_dir" {
  type        = string
  default     = "/var/lib/oxide-csi"
  description = "directory for the plugin's state, which must survive restarts; with docker, the same path in the container"
}

variable "max_disks" {
  type        = number
  default     = 8
  description = "attach limit of an instance, including the boot disk; the same for controller and nodes: 12 on racks of release 18 and later"
}

variable "memory" {
  type        = number
  default     = 256
  description = "memory in MiB that each client reserves; with raw_exec, and without memory oversubscription, also the limit for the plugin and for mkfs and fsck"
}

variable "memory_max" {
  type        = number
  default     = -1
  description = "with raw_exec: the limit in MiB, or -1 for none; if the scheduler allows no memory oversubscription, Nomad warns, and memory is the limit"
}

variable "attach_mode" {
  type        = string
  default     = "hot"
  description = "hot; or restart, for planned restarts. The same for controller and nodes. With ACLs, restart needs the policies policies/restart-*"
}

variable "http_address" {
  type        = string
  default     = "127.0.0.1"
  description = "address to serve /livez, /readyz and /metrics on"
}

variable "namespace" {
  type        = string
  default     = "oxide-csi"
  description = "a namespace for the plugin's jobs alone: all who may submit jobs in it can read the rack's token"
}

job "oxide-csi-node" {
  namespace   = var.namespace
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

  # If a new version does not become healthy within five minutes on one client, Nomad goes back to the version before.
  # Without a deadline of zero it would try other clients first.
  update {
    max_parallel      = 1
    auto_revert       = true
    progress_deadline = "0s"
  }

  group "node" {
    network {
      port "http" {}
    }

    # With this setting Nomad regards an unreachable client as disconnected instead of down, so that allocations that
    # wait for the client keep waiting.
    disconnect {
      lost_after = "24h"
    }

    # A drain by force ends this job together with the jobs that use volumes. For this time the plugin still unmounts for
    # them. Jobs with a longer kill_timeout need -ignore-system.
    shutdown_delay = "15s"

    # Restarts it at once: no volume can be mounted while it is down, and the default delay of a system job is 15 s.
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
      driver       = var.driver
      user         = "root"
      kill_timeout = "30s"
      kill_signal  = "SIGTERM"

      # The task has one of these two blocks.
      dynamic "config" {
        for_each = var.driver == "docker" ? [] : [1]

        content {
          command = var.command
        }
      }

      # Disks are attached and detached while it runs. Nomad itself mounts the host's /dev.
      dynamic "config" {
        for_each = var.driver == "docker" ? [1] : []

        content {
          # Without an image, coalesce fails and the job is not submitted.
          image        = coalesce(var.image)
          network_mode = "host"
          # Before a disk is detached, the plugin looks in /proc for programs that still have it open: the host's too.
          pid_mode        = "host"
          privileged      = true
          readonly_rootfs = true
          # In effect no limit (1 TiB): a check of a large filesystem must not be killed. So docker does not limit the
          # container to the memory that the task reserves.
          memory_hard_limit = 1048576

          # A planned restart powers the guest off through D-Bus.
          volumes = concat(
            ["${var.state_dir}:${var.state_dir}"],
            var.attach_mode != "hot" ? ["/run/dbus:/run/dbus:ro"] : [],
          )
        }
      }

      # Sets NOMAD_UNIX_ADDR and NOMAD_TOKEN, for reading the client's metadata.
      identity {
        env = true
      }

      # Nomad sets CSI_ENDPOINT.
      env {
        OXIDE_CSI_MODE          = "node"
        OXIDE_CSI_MAX_DISKS     = var.max_disks
        OXIDE_CSI_ATTACH_MODE   = var.attach_mode
        OXIDE_CSI_STATE_DIR     = var.state_dir
        OXIDE_CSI_HTTP_ENDPOINT = "${var.http_address}:${NOMAD_PORT_http}"

        # A soft memory limit for Go's garbage collector. The rest of the task's memory is for mkfs and fsck.
        GOMEMLIMIT = "64MiB"
      }

      # The plugin is unhealthy until it knows its instance. A restart would not help.
      csi_plugin {
        id                     = "oxide"
        type                   = "node"
        mount_dir              = "/csi"
        stage_publish_base_dir = "${var.data_dir}/client/csi/node/oxide"
        health_timeout         = "10m"
      }

      resources {
        cpu        = 100
        memory     = var.memory
        memory_max = var.memory_max
      }
    }
  }
}
