# A job that stays on its client while that restarts. With a volume it writes a line into a file of it each time that it starts.

variable "name" {
  type = string
}

variable "volume" {
  type    = string
  default = ""
}

job "stays" {
  id          = var.name
  datacenters = ["*"]

  constraint {
    attribute = "${node.unique.name}"
    value     = "node-a"
  }

  group "stays" {
    # A client that is away for less is waited for.
    disconnect {
      lost_after = "10m"
      replace    = false
    }

    restart {
      attempts = 10
      interval = "10m"
      delay    = "1s"
      mode     = "delay"
    }

    # One that waits for its volume ends when the client's agent does.
    reschedule {
      delay          = "5s"
      delay_function = "constant"
      unlimited      = true
    }

    dynamic "volume" {
      for_each = var.volume == "" ? [] : [var.volume]
      labels   = ["data"]

      content {
        type            = "csi"
        source          = volume.value
        access_mode     = "single-node-writer"
        attachment_mode = "file-system"
      }
    }

    task "stays" {
      driver       = "exec"
      user         = "nobody"
      kill_timeout = "5s"

      config {
        command = "/bin/sh"
        args    = ["-c", "mkdir -p /data; echo written by $NOMAD_ALLOC_ID >>/data/lines; sync; cat /data/lines; exec sleep 1000000"]
      }

      dynamic "volume_mount" {
        for_each = var.volume == "" ? [] : [var.volume]

        content {
          volume      = "data"
          destination = "/data"
        }
      }

      resources {
        cpu    = 20
        memory = 16
      }
    }
  }
}
