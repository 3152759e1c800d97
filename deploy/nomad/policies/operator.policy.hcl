# The rights of a user who creates volumes and runs jobs with them, but does not install the plugin or see its token. The
# token is in the plugin's namespace. But who may submit jobs with raw_exec, or privileged ones with docker, is root on the
# clients, and can read what every task there can: forbid these drivers to such users, or trust them with the token.
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
