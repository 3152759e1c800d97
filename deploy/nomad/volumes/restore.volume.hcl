# A volume with the data of a snapshot: nomad volume create restore.volume.hcl
#
# nomad volume snapshot list -plugin oxide shows the SNAPSHOT-ID. To copy a volume in its present state, set clone_id =
# "<its external ID>" instead.
id          = "restored"
name        = "restored"
namespace   = "default"
type        = "csi"
plugin_id   = "oxide"
snapshot_id = "SNAPSHOT-ID"

# At least the size of the snapshot. The filesystem is grown to this size.
capacity_min = "2GiB"
capacity_max = "2GiB"

capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}

mount_options {
  fs_type = "ext4"
}
