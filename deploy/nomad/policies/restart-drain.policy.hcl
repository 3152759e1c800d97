# And for restarts that take allocations off a client first (OXIDE_CSI_RESTART_SHUTDOWN=drain), in every namespace that has jobs:
# what the controller cannot see there, it takes for gone.
#
#   nomad acl policy apply -namespace default -job oxide-csi-controller oxide-csi-controller-drain restart-drain.policy.hcl
namespace "*" {
  capabilities = ["read-job", "alloc-lifecycle"]
}
