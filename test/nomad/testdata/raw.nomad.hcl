# It shows what the disk begins with, and writes its allocation's ID there.

variable "client" {
  type = string
}

job "example" {
  datacenters = ["*"]

  constraint {
    attribute = "${node.unique.name}"
    value     = var.client
  }

  group "example" {
    volume "raw" {
      type            = "csi"
      source          = "raw"
      access_mode     = "single-node-writer"
      attachment_mode = "block-device"
    }

    task "example" {
      driver       = "docker"
      kill_timeout = "1s"

      # Nomad shows the device to the task and does not allow the task to open it.
      config {
        image      = "consumer:test"
        privileged = true
        command    = "/bin/busybox"
        args       = ["sh", "-c", "echo found $(busybox head -c 36 /dev/volume | busybox tr '\\0' 0) && printf $NOMAD_ALLOC_ID | busybox dd of=/dev/volume conv=fsync && exec busybox sleep 1000000"]
      }

      volume_mount {
        volume      = "raw"
        destination = "/dev/volume"
      }

      resources {
        cpu    = 50
        memory = 32
      }
    }
  }
}
