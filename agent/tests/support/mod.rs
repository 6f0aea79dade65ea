//! What the tests with a kernel share.

pub mod killed;
pub mod lab;
pub mod scenario;
pub mod sctp;
pub mod traffic;
pub mod world;

/// Fails where the kernel has no IPVS, instead of passing without having tested anything.
#[allow(dead_code, reason = "only the tests of IPVS need it")]
pub fn needs_ipvs() {
    assert!(
        std::path::Path::new("/proc/net/ip_vs").exists(),
        "this kernel has no IPVS: run the test by `hack/test ipvs`, or in the kernel that hack/uml boots"
    );
    // So little memory makes a small table, which traffic fills. All namespaces share it, and only the first one may say so.
    std::fs::write("/proc/sys/net/netfilter/nf_conntrack_max", "65536").unwrap();
}
