//! An endpoint's process is killed under load: a proxy loses no request, and the kernel loses none once the slice has changed.

use pointsman_crds::settings::UserspaceScheduler;

use crate::support::killed::{kill_one, kill_one_under_the_kernel};
use crate::support::world::{IN_KERNEL, Way};

#[test]
fn a_proxy_loses_no_request_when_one_of_three_endpoints_dies() {
    for scheduler in [UserspaceScheduler::Rr, UserspaceScheduler::Lc] {
        kill_one(Way::Userspace, scheduler, |_, _| None);
    }
}

#[test]
fn the_kernel_loses_no_request_once_the_slice_has_changed() {
    IN_KERNEL.into_iter().for_each(kill_one_under_the_kernel);
}
