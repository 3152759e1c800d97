# The rights of the identity of the job oxide-csi-node (or oxide-csi, the monolith): read the metadata of its client.
#
#   nomad acl policy apply -namespace oxide-csi -job oxide-csi-node oxide-csi-node node.policy.hcl
node {
  policy = "read"
}
