# The rights of the identity of the job oxide-csi-controller (or oxide-csi, the monolith): find out which clients use a
# volume, in every namespace. Before the controller detaches a disk later than Nomad asked for it, no volume of Nomad
# with this disk may have a claim from that client, and no stopped allocation there may have lost its claim before its
# end. If any rule hides a namespace from the identity, no such disk is detached. Nomad can also release a volume without
# telling the plugin.
#
#   nomad acl policy apply -namespace oxide-csi -job oxide-csi-controller oxide-csi-controller controller.policy.hcl
namespace "*" {
  capabilities = ["csi-list-volume", "csi-read-volume", "read-job"]
}

plugin {
  policy = "read"
}

node {
  policy = "read"
}
