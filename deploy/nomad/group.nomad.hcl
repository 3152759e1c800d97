# A job for volumes that belong together, on a rack without hot-plug. All its volumes together cost their client one
# restart, and then stay there (docs/explanation/racks-without-hotplug.md).
#
# Each volume has its own allocation, so that Nomad requests all volumes at once. If one allocation has several
# volumes, Nomad requests them one after another, and each would cost a restart. For such a job, first attach the
# volumes with this job, stop it, and then run the other job on the same client.
#
#   for n in 0 1; do sed "s/\"data\"/\"group[$n]\"/" volumes/create.volume.hcl | nomad volume create -; done
#   nomad job run -var=client=db-1 group.nomad.hcl

variable "name" {
  type        = string
  default     = "group"
  description = "name of the job. Its volumes have this name and [0], [1] and so on as IDs"
}

variable "volumes" {
  type        = number
  default     = 2
  description = "number of volumes: at most max_disks minus the boot disk"
}

variable "client" {
  type        = string
  description = "name of the client with the job's volumes"
}

job "group" {
  id          = var.name
  datacenters = ["*"]

  # On any other client all its volumes would have to move, which costs both clients a restart. For several clients run
  # the job once for each, with different names.
  constraint {
    attribute = "${node.unique.name}"
    value     = var.client
  }

  group "group" {
    count = var.volumes

    # Nomad waits for allocations on a client that is down, also for those that still wait for their volume. With
    # lost_after Nomad would give up the latter.
    disconnect {
      replace = false
    }

    # Nomad fails and replaces an allocation with volumes when its client has restarted. The default delay is 30 s and
    # grows each time.
    reschedule {
      delay          = "5s"
      delay_function = "constant"
      unlimited      = true
    }

    # How long Nomad requests a volume. The volume may have to wait for a restart window at night.
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

    # At each start it appends a line to a file on its volume, and prints the whole file.
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
