# A disk that is there already, made by hand: nomad volume register register.volume.hcl
#
# The plugin never deletes it. nomad volume deregister takes it out of Nomad again.
id          = "existing"
name        = "existing"
namespace   = "default"
type        = "csi"
plugin_id   = "oxide"
external_id = "DISK-ID"

capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}

mount_options {
  fs_type = "ext4"
}

# The disk's name: a guest knows its disks by that.
context {
  diskName = "DISK-NAME"
}
