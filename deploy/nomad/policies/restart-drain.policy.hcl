# The additional rights for restarts that drain a client first (OXIDE_CSI_RESTART_SHUTDOWN=drain), in every namespace
# with jobs. The controller takes an allocation that it cannot see for ended.
#
#   nomad acl policy apply -namespace oxide-csi -job oxide-csi-controller oxide-csi-controller-drain restart-drain.policy.hcl
namespace "*" {
  capabilities = ["read-job", "alloc-lifecycle"]
}
