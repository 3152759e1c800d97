# A job with a volume: at each start it appends a line to a file on the volume, and prints the whole file.

variable "volume" {
  type    = string
  default = "data"
}

variable "client" {
  type        = string
  default     = ".*"
  description = "regular expression for the names of the clients to run on"
}

job "example" {
  datacenters = ["*"]

  constraint {
    attribute = "${node.unique.name}"
    operator  = "regexp"
    value     = var.client
  }

  group "example" {
    volume "data" {
      type            = "csi"
      source          = var.volume
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
    }

    task "example" {
      driver       = "exec"
      user         = "nobody"
      kill_timeout = "1s"

      config {
        command = "/bin/sh"
        args    = ["-c", "echo written by $NOMAD_ALLOC_ID >>/data/lines && sync && cat /data/lines && exec sleep 1000000"]
      }

      volume_mount {
        volume      = "data"
        destination = "/data"
      }

      resources {
        cpu    = 50
        memory = 32
      }
    }
  }
}
