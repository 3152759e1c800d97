# Controller and node plugin in one process, for a Nomad with a single machine. Elsewhere use the jobs controller and
# node: this job would put the rack's token on every client.
#
# The rack's token is a Nomad variable at nomad/jobs/oxide-csi: docs/how-to/nomad.md says how to put it there. The job runs
# as root on clients whose metadata names the rack: node.nomad.hcl says what the client's configuration needs for that.

variable "oxide_host" {
  type        = string
  description = "the rack's API, such as https://silo.sys.example.com"
}

variable "oxide_project" {
  type        = string
  description = "project of the disks and the instance"
}

variable "cluster_id" {
  type        = string
  description = "distinguishes the volumes of this Nomad from all others in the project; must never change: 1 to 63 of a-z, 0-9 and '-'"
}

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
  description = "path of the program on the client; not used by docker"
}

variable "data_dir" {
  type        = string
  default     = "/opt/nomad/data"
  description = "data_dir of the client; with raw_exec, if it is wrong, the plugin gets paths that do not exist"
}

variable "state_dir" {
  type        = string
  default     = "/var/lib/oxide-csi"
  description = "directory for the plugin's state, which must survive restarts; with docker, the same path in the container"
}

variable "max_disks" {
  type        = number
  default     = 8
  description = "attach limit of an instance, including the boot disk: 12 on racks of release 18 and later"
}

variable "memory" {
  type        = number
  default     = 256
  description = "memory in MiB that the client reserves; with raw_exec, and without memory oversubscription, also the limit for the plugin and for mkfs and fsck"
}

variable "memory_max" {
  type        = number
  default     = -1
  description = "with raw_exec: the limit in MiB, or -1 for none; if the scheduler allows no memory oversubscription, Nomad warns, and memory is the limit"
}

variable "detach_grace" {
  type        = string
  default     = ""
  description = "how long a disk stays attached to a running instance after its volume was unpublished, because Nomad requests the detach before the node has unmounted if the node's plugin is down; 60s if empty"
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

job "oxide-csi" {
  namespace   = var.namespace
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

  group "monolith" {
    network {
      port "http" {}
    }

    # A drain by force ends this job together with the jobs that use volumes. For this time the plugin still unmounts for
    # them. Jobs with a longer kill_timeout need -ignore-system.
    shutdown_delay = "15s"

    # Without the plugin no volume can be attached or mounted.
    restart {
      attempts = 10
      interval = "5m"
      delay    = "2s"
      mode     = "delay"
    }

    service {
      name     = "oxide-csi"
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

          # The node's image has no certificates, so the plugin uses the client's.
          volumes = ["/etc/ssl/certs:/etc/ssl/certs:ro", "${var.state_dir}:${var.state_dir}"]
        }
      }

      # Sets NOMAD_UNIX_ADDR and NOMAD_TOKEN, for reading the client's metadata.
      identity {
        env = true
      }

      # Nomad sets CSI_ENDPOINT. The topology of the controller and of the node must name the same rack.
      env {
        OXIDE_CSI_MODE          = "all"
        OXIDE_HOST              = var.oxide_host
        OXIDE_PROJECT           = var.oxide_project
        OXIDE_TOKEN_FILE        = "${NOMAD_SECRETS_DIR}/token"
        OXIDE_CSI_CLUSTER_ID    = var.cluster_id
        OXIDE_RACK              = "${meta.oxide.rack}"
        OXIDE_CSI_MAX_DISKS     = var.max_disks
        OXIDE_CSI_STATE_DIR     = var.state_dir
        OXIDE_CSI_DETACH_GRACE  = var.detach_grace
        OXIDE_CSI_HTTP_ENDPOINT = "${var.http_address}:${NOMAD_PORT_http}"

        # A soft memory limit for Go's garbage collector. The rest of the task's memory is for mkfs and fsck.
        GOMEMLIMIT = "64MiB"
      }

      # The plugin reads the file again when it changes, so a new token needs no restart.
      template {
        data        = "{{ with nomadVar (printf \"nomad/jobs/%s\" (env \"NOMAD_JOB_ID\")) }}{{ .token }}{{ end }}"
        destination = "${NOMAD_SECRETS_DIR}/token"
        perms       = "0600"
        change_mode = "noop"
      }

      # The plugin is unhealthy until it knows its instance. A restart would not help.
      csi_plugin {
        id                     = "oxide"
        type                   = "monolith"
        mount_dir              = "/csi"
        stage_publish_base_dir = "${var.data_dir}/client/csi/monolith/oxide"
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
