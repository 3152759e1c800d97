# The rights of a user who creates volumes and runs jobs with them, but does not install the plugin or see its token.
#
#   nomad acl policy apply volumes operator.policy.hcl
namespace "default" {
  capabilities = [
    "csi-list-volume", "csi-read-volume", "csi-write-volume", "csi-mount-volume",
    "list-jobs", "read-job", "submit-job", "read-logs",
  ]
}

plugin {
  policy = "read"
}
