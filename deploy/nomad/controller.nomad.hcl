# The controller: it calls the rack's API and runs on any client. There is one: Nomad sends each call to any of several
# controllers, so nothing would be in order between them (docs/explanation/controller.md). Nomad runs it elsewhere
# when its client is lost.
#
# The rack's token is a Nomad variable at nomad/jobs/<name of this job>. This job can read it, and so can all who may
# submit jobs in its namespace. docs/how-to/nomad.md says how to put it there.

variable "oxide_host" {
  type        = string
  description = "the rack's API, such as https://silo.sys.example.com"
}

variable "oxide_project" {
  type        = string
  description = "project of the disks and the instances"
}

variable "cluster_id" {
  type        = string
  description = "distinguishes the volumes of this Nomad region from all others in the project; must never change: 1 to 63 of a-z, 0-9 and '-'"
}

variable "rack" {
  type        = string
  default     = "default"
  description = "the rack's name, which must never change: the value of oxide.rack in the metadata of its clients"
}

variable "driver" {
  type        = string
  default     = "raw_exec"
  description = "raw_exec, which runs the program at command; exec, if the client's chroot_env has the program and the system's certificates; or docker, which runs controller_image"

  validation {
    condition     = contains(["raw_exec", "exec", "docker"], var.driver)
    error_message = "The driver must be raw_exec, exec or docker."
  }
}

variable "controller_image" {
  type        = string
  default     = null
  description = "the controller's image, required by docker: oxidecomputer/oxide-csi-controller:v0.1.0, or its name in your registry"
}

variable "command" {
  type        = string
  default     = "/usr/local/bin/oxide-csi"
  description = "path of the program in the task's view; not used by docker"
}

variable "controller_memory" {
  type        = number
  default     = 64
  description = "memory in MiB that the client reserves, and the limit: 128 for thousands of nodes (docs/explanation/scale.md)"
}

variable "controllers" {
  type        = number
  default     = 1
  description = "number of controllers, each on a different host. One; for planned restarts two, because a controller leaves the restart of its own client to another one"
}

variable "max_disks" {
  type        = number
  default     = 8
  description = "attach limit of an instance, including the boot disk; the same for controller and nodes: 12 on racks of release 18 and later"
}

variable "attach_mode" {
  type        = string
  default     = "hot"
  description = "hot; or restart, for planned restarts. The same for controller and nodes. With ACLs, restart needs the policies policies/restart-*"
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

job "oxide-csi-controller" {
  namespace   = var.namespace
  datacenters = ["*"]
  priority    = 90

  constraint {
    attribute = "${attr.kernel.name}"
    value     = "linux"
  }

  # If a new version does not become healthy within five minutes on one client, Nomad goes back to the version before.
  # Without a deadline of zero it would try other clients first.
  update {
    max_parallel      = 1
    auto_revert       = true
    progress_deadline = "0s"
  }

  group "controller" {
    count = var.controllers

    constraint {
      operator = "distinct_hosts"
      value    = "true"
    }

    network {
      port "http" {}
    }

    # When the client has not reached a server for this time, it ends the controller. Nomad starts another one after this
    # time and the kill_timeout, so two never serve. It must be longer than the clients' interval of heartbeats, which
    # exceeds a minute in regions with more than 1500 clients.
    disconnect {
      stop_on_client_after = "1m"
    }

    # Restarts it at once: no volume can be attached while it is down.
    restart {
      attempts = 10
      interval = "5m"
      delay    = "2s"
      mode     = "fail"
    }

    # Starts it on another client if it does not run on this one. The default delay is 30 s and grows each time.
    reschedule {
      delay          = "5s"
      delay_function = "constant"
      unlimited      = true
    }

    service {
      name     = "oxide-csi-controller"
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
      kill_timeout = "30s"
      kill_signal  = "SIGTERM"

      # With docker root, because the socket and the token belong to root, but without capabilities.
      user = var.driver == "docker" ? "root" : ""

      # The task has one of these two blocks.
      dynamic "config" {
        for_each = var.driver == "docker" ? [] : [1]

        content {
          command = var.command
        }
      }

      dynamic "config" {
        for_each = var.driver == "docker" ? [1] : []

        content {
          # Without an image, coalesce fails and the job is not submitted.
          image           = coalesce(var.controller_image)
          network_mode    = "host"
          cap_drop        = ["all"]
          readonly_rootfs = true
        }
      }

      # Sets NOMAD_UNIX_ADDR and NOMAD_TOKEN, for reading the claims of volumes and for requesting planned restarts from
      # nodes. Without a policy they grant no right.
      identity {
        env = true
      }

      # Nomad sets CSI_ENDPOINT.
      env {
        OXIDE_CSI_MODE          = "controller"
        OXIDE_HOST              = var.oxide_host
        OXIDE_PROJECT           = var.oxide_project
        OXIDE_TOKEN_FILE        = "${NOMAD_SECRETS_DIR}/token"
        OXIDE_CSI_CLUSTER_ID    = var.cluster_id
        OXIDE_RACK              = var.rack
        OXIDE_CSI_MAX_DISKS     = var.max_disks
        OXIDE_CSI_ATTACH_MODE   = var.attach_mode
        OXIDE_CSI_DETACH_GRACE  = var.detach_grace
        OXIDE_CSI_HTTP_ENDPOINT = "${var.http_address}:${NOMAD_PORT_http}"

        # A soft memory limit for Go's garbage collector, below the task's memory.
        GOMEMLIMIT = "${var.controller_memory - 6}MiB"
      }

      # The plugin reads the file again when it changes, so a new token needs no restart.
      template {
        data        = "{{ with nomadVar (printf \"nomad/jobs/%s\" (env \"NOMAD_JOB_ID\")) }}{{ .token }}{{ end }}"
        destination = "${NOMAD_SECRETS_DIR}/token"
        perms       = "0600"
        change_mode = "noop"
      }

      csi_plugin {
        id             = "oxide"
        type           = "controller"
        mount_dir      = "/csi"
        health_timeout = "10m"
      }

      resources {
        cpu    = 100
        memory = var.controller_memory
      }
    }
  }
}
