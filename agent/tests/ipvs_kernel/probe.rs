//! The check of a node, and the settings of the kernel that mode ipvs needs.

use std::path::Path;

use pointsman_agent::ipset;
use pointsman_agent::ipvs::client::Connection;
use pointsman_agent::ipvs::device::Device;
use pointsman_agent::ipvs::probe::{Missing, preflight};
use pointsman_agent::sysctl::{self, Applied, Machine, Setting, Sysctls};
use pointsman_crds::proxy_node_status::IpFamily;

use crate::isolated;

const BOTH: [IpFamily; 2] = [IpFamily::IPv4, IpFamily::IPv6];

#[test]
fn a_node_that_can_lacks_nothing_and_is_left_as_it_was() {
    isolated(|| {
        for scheduler in ["rr", "wrr", "lc", "wlc", "lblc", "lblcr", "sh", "dh", "sed", "nq", "mh"] {
            assert_eq!(preflight(ipset::check(), Connection::open(), scheduler, &BOTH), [], "{scheduler}");
        }
        assert_eq!(Connection::open().unwrap().read(&BOTH).unwrap(), []);
        Device::find().unwrap().expect("it is needed next").remove().unwrap();
        let missing = preflight(ipset::check(), Connection::open(), "none-such", &BOTH);
        assert!(Device::find().unwrap().is_none());
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
