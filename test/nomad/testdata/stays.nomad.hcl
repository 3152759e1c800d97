# A job that stays on its client while that restarts: one allocation with any number of volumes, which writes and shows what
# deploy/nomad/group.nomad.hcl does.

variable "name" {
  type = string
}

variable "volumes" {
  type        = map(string)
  default     = {}
  description = "IDs of volumes by the names of the folders below /data where they are mounted"
}

job "stays" {
  id          = var.name
  datacenters = ["*"]

  constraint {
    attribute = "${node.unique.name}"
    value     = "node-a"
  }

  group "stays" {
    disconnect {
      replace = false
    }

    reschedule {
      delay          = "5s"
      delay_function = "constant"
      unlimited      = true
    }

    dynamic "volume" {
      for_each = var.volumes
      labels   = [volume.key]

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
      kill_timeout = "1s"

      config {
        command = "/bin/sh"
        args    = ["-c", "for dir in /data/*; do test ! -d $dir || { echo written by $NOMAD_ALLOC_ID >>$dir/lines; cat $dir/lines; }; done; exec sleep 1000000"]
      }

      dynamic "volume_mount" {
        for_each = var.volumes

        content {
          volume      = volume_mount.key
          destination = "/data/${volume_mount.key}"
        }
      }

      resources {
        cpu    = 20
        memory = 16
      }
    }
  }
}
