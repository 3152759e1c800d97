# A job for volumes that belong together, on a rack without hot-plug: as many volumes as it has, they cost their client one
# restart, and stay there (docs/explanation/racks-without-hotplug.md).
#
# Each volume has an allocation of its own, so that all are asked for at once. Of several volumes in one allocation Nomad asks for
# the next when it has got the one before, and each would cost a restart: have this job bring them to the client, stop it, and run
# there the one that uses them together.
#
#   for n in 0 1; do sed "s/\"data\"/\"group[$n]\"/" volumes/create.volume.hcl | nomad volume create -; done
#   nomad job run -var=client=db-1 group.nomad.hcl

variable "name" {
  type        = string
  default     = "group"
  description = "name of the job, and of its volumes: those with an ID of this and [0], [1] and so on"
}

variable "volumes" {
  type        = number
  default     = 2
  description = "how many volumes it has: no more than max_disks less the boot disk"
}

variable "client" {
  type        = string
  description = "name of the client on which its volumes are"
}

job "group" {
  id          = var.name
  datacenters = ["*"]

  # Anywhere else all its volumes would have to go, which costs both clients a restart. For several clients run it once for each, under
  # a name of its own.
  constraint {
    attribute = "${node.unique.name}"
    value     = var.client
  }

  group "group" {
    count = var.volumes

    # What runs on a client that is away is waited for, and so is what still waits there for its volume: with lost_after Nomad would
    # give up the latter.
    disconnect {
      replace = false
    }

    # Nomad fails and replaces an allocation with volumes whose client has restarted; by default it waits for 30 s, and longer each time.
    reschedule {
      delay          = "5s"
      delay_function = "constant"
      unlimited      = true
    }

    # As long as Nomad asks for a volume, which may have to wait for a night.
    update {
      healthy_deadline  = "23h"
      progress_deadline = "24h"
    }

    volume "data" {
      type            = "csi"
      source          = var.name
      per_alloc       = true
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
    }

    # It writes a line into a file of its volume each time that it starts, and shows the whole file.
    task "group" {
      driver       = "exec"
      user         = "nobody"
      kill_timeout = "1s"

      config {
        command = "/bin/sh"
        args    = ["-c", "echo written by $NOMAD_ALLOC_ID >>/data/lines && cat /data/lines && exec sleep 1000000"]
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
