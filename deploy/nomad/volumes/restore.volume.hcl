# A volume with what a snapshot holds: nomad volume create restore.volume.hcl
#
# SNAPSHOT-ID is what nomad volume snapshot list -plugin oxide shows. For a copy of a volume as it is now, give
# clone_id = "<its external ID>" instead.
id          = "restored"
name        = "restored"
namespace   = "default"
type        = "csi"
plugin_id   = "oxide"
snapshot_id = "SNAPSHOT-ID"

# At least the size of the snapshot; the filesystem grows with it.
capacity_min = "2GiB"
capacity_max = "2GiB"

capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}

mount_options {
  fs_type = "ext4"
}
