//! The check of a node, and the settings of the kernel that mode ipvs needs.

use std::path::Path;

use pointsman_agent::iptables::{Flavour, Tools};
use pointsman_agent::ipvs::client::Connection;
use pointsman_agent::ipvs::device::Device;
use pointsman_agent::ipvs::probe::{Missing, preflight};
use pointsman_agent::sysctl::{self, Applied, Machine, Setting, Sysctls};
use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::IptablesBackend;

use crate::isolated;
use crate::support::lab::shell;
use crate::support::world::block_on;

const BOTH: [IpFamily; 2] = [IpFamily::IPv4, IpFamily::IPv6];

#[test]
fn a_node_that_can_lacks_nothing_and_is_left_as_it_was() {
    isolated(|| {
        for scheduler in ["rr", "wrr", "lc", "wlc", "lblc", "lblcr", "sh", "dh", "sed", "nq", "mh"] {
            let ipset = Ok(shell("ipset --version"));
            assert_eq!(preflight(ipset, Connection::open(), scheduler, &BOTH), [], "{scheduler}");
        }
        assert_eq!(Connection::open().unwrap().read(&BOTH).unwrap(), []);
        assert!(Device::find().unwrap().is_none());
        let missing = preflight(Ok(shell("ipset --version")), Connection::open(), "none-such", &BOTH);
        assert_eq!(missing.len(), 2, "{missing:?}");
        assert!(matches!(&missing[0], Missing::Scheduler { name, .. } if name == "none-such"));
        assert!(missing[0].to_string().contains("ip_vs_none-such"), "{}", missing[0]);
    });
}

#[test]
fn settings_are_written_before_the_first_virtual_server() {
    isolated(|| {
        let root = Path::new("/proc/sys");
        let sysctls = Sysctls::new(root);
        let machine = Machine::this();
        let applied = sysctls.prepare_ipvs(machine);
        assert_eq!(applied.failed, []);
        let now = sysctl::read(root);
        for setting in [
            Setting::IpvsConntrack,
            Setting::IpvsExpireNodestConn,
            Setting::IpvsExpireQuiescentTemplate,
            Setting::IpForward,
        ] {
            assert_eq!(now[&setting], 1, "{setting}");
        }
        assert!(now.contains_key(&Setting::IpvsConnReuseMode), "{now:?}");
        assert_eq!(sysctls.prepare_ipvs(machine), Applied::default());
    });
}

#[test]
fn the_flavour_is_one_that_the_kernel_has() {
    isolated(|| {
        // Both tools are installed, and this kernel has no nftables.
        let tools = block_on(Tools::detect(IptablesBackend::Auto)).unwrap();
        assert_eq!(tools.flavour(), Flavour::Legacy, "{}", tools.version());
    });
}
