# An existing disk, created by an operator: nomad volume register register.volume.hcl
#
# The plugin never deletes the disk. nomad volume deregister removes the volume from Nomad.
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

# The name of the disk, by which a guest finds it.
context {
  diskName = "DISK-NAME"
}
