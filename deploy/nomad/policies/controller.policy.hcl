# The rights of the identity of the job oxide-csi-controller (or oxide-csi, the monolith): find out which clients use a
# volume, in every namespace with volumes. Nomad can release a volume without telling the plugin.
#
#   nomad acl policy apply -namespace oxide-csi -job oxide-csi-controller oxide-csi-controller controller.policy.hcl
namespace "*" {
  capabilities = ["csi-list-volume", "csi-read-volume"]
}

plugin {
  policy = "read"
}

node {
  policy = "read"
}
