# A new volume, with a new disk: nomad volume create create.volume.hcl
#
# The name identifies the disk in this cluster, in all namespaces: one name, one disk. The plugin refuses a second volume
# of the same name (docs/explanation/nomad.md).
id        = "data"
name      = "data"
namespace = "default"
type      = "csi"
plugin_id = "oxide"

# Whole GiB, from 1 GiB to 1023 GiB. For a larger volume, stop the jobs that use it, raise both values, and run
# nomad volume create again.
capacity_min = "1GiB"
capacity_max = "1GiB"

capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}

mount_options {
  fs_type     = "ext4"
  mount_flags = ["noatime"]
}

# Owner and mode of the new filesystem, for tasks that are not root. Nomad changes neither.
parameters {
  rootUid  = "65534"
  rootGid  = "65534"
  rootMode = "0750"
}

# With several racks, name one here. The default is the first rack in the controller's configuration.
topology_request {
  required {
    topology {
      segments = {
        "topology.csi.oxide.computer/rack" = "default"
      }
    }
  }
}
