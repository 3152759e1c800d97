id           = "raw"
name         = "raw"
type         = "csi"
plugin_id    = "oxide"
capacity_min = "1GiB"

capability {
  access_mode     = "single-node-writer"
  attachment_mode = "block-device"
}
