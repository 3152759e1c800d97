# Controller and node plugin in one process, for a Nomad that is one machine. Elsewhere use controller and node: this one
# would put the rack's token on every client.
#
# The token is in Nomad's variables, at nomad/jobs/oxide-csi: see token.nv.hcl. It is privileged, and runs where the
# client's metadata names the rack: node.nomad.hcl says what that asks of the client.

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
  description = "tells this Nomad apart from all else that has volumes in the project, for ever: 1 to 63 of a-z, 0-9 and '-'"
}

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
  description = "disks that an instance takes, boot disk included: 12 on racks from release 18 on"
}

variable "attach_mode" {
  type        = string
  default     = "hot"
  description = "hot; restart, for planned restarts; or plan, which only reports them. With ACLs on, restart and plan need the policies policies/restart-*"
}

variable "detach_grace" {
  type        = string
  default     = ""
  description = "how long a detach from a running instance is refused: Nomad asks for it before a node has unmounted, when that node's plugin is away; 60s if empty"
}

variable "http_address" {
  type        = string
  default     = "127.0.0.1"
  description = "address to serve /livez, /readyz and /metrics on"
}

job "oxide-csi" {
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

    # Nothing can be attached or mounted while it is away.
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

        # The node's image has no certificates, so the plugin trusts the authorities that the client trusts. A planned
        # restart powers the guest off by D-Bus.
        volumes = concat(
          ["/etc/ssl/certs:/etc/ssl/certs:ro"],
          var.attach_mode != "hot" ? ["/run/dbus:/run/dbus:ro"] : [],
        )

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

      # CSI_ENDPOINT comes from Nomad. A controller's topology and a node's must name the same rack.
      env {
        OXIDE_CSI_MODE          = "all"
        OXIDE_HOST              = var.oxide_host
        OXIDE_PROJECT           = var.oxide_project
        OXIDE_TOKEN_FILE        = "${NOMAD_SECRETS_DIR}/token"
        OXIDE_CSI_CLUSTER_ID    = var.cluster_id
        OXIDE_RACK              = "${meta.oxide.rack}"
        OXIDE_CSI_MAX_DISKS     = var.max_disks
        OXIDE_CSI_ATTACH_MODE   = var.attach_mode
        OXIDE_CSI_DETACH_GRACE  = var.detach_grace
        OXIDE_CSI_HTTP_ENDPOINT = "${var.http_address}:${NOMAD_PORT_http}"

        # A soft limit for Go's collector: the rest of the task's memory is for mkfs and fsck.
        GOMEMLIMIT = "64MiB"
      }

      # The plugin reads the file again when it changes, so a new token needs no restart.
      template {
        data        = "{{ with nomadVar (printf \"nomad/jobs/%s\" (env \"NOMAD_JOB_ID\")) }}{{ .token }}{{ end }}"
        destination = "${NOMAD_SECRETS_DIR}/token"
        perms       = "0600"
        change_mode = "noop"
      }

      # Until the plugin knows who it is, it is not healthy, and a restart would mend nothing.
      csi_plugin {
        id             = "oxide"
        type           = "monolith"
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
