//! CT-10: which settings are written, by configuration and by what the kernel has; and writing below another root.

use super::*;

const NOTHING: NodeConntrack = NodeConntrack {
    max_per_core: 0,
    min: 0,
    tcp_be_liberal: false,
    tcp_established_timeout_seconds: 0,
    tcp_close_wait_timeout_seconds: 0,
    udp_timeout_seconds: 0,
    udp_stream_timeout_seconds: 0,
};

/// The defaults of kube-proxy.
const DEFAULTS: NodeConntrack = NodeConntrack {
    max_per_core: 32_768,
    min: 131_072,
    tcp_established_timeout_seconds: 86_400,
    tcp_close_wait_timeout_seconds: 3_600,
    ..NOTHING
};

fn asks(conntrack: &NodeConntrack) -> Settings {
    Settings { conntrack: *conntrack, ipvs: None }
}

const fn machine(cpus: u32) -> Machine {
    Machine { cpus, kernel: (6, 1) }
}

/// What a kernel may have.
const KERNEL: [(Setting, u32); 14] = [
    (Setting::Max, 65_536),
    (Setting::HashSize, 16_384),
    (Setting::TcpEstablishedTimeout, 432_000),
    (Setting::TcpCloseWaitTimeout, 60),
    (Setting::TcpBeLiberal, 0),
    (Setting::UdpTimeout, 30),
    (Setting::UdpStreamTimeout, 120),
    (Setting::IpvsConntrack, 0),
    (Setting::IpvsConnReuseMode, 1),
    (Setting::IpvsExpireNodestConn, 0),
    (Setting::IpvsExpireQuiescentTemplate, 0),
    (Setting::IpForward, 0),
    (Setting::ArpIgnore, 0),
    (Setting::ArpAnnounce, 0),
];

fn kernel(changes: &[(Setting, u32)]) -> Current {
    KERNEL.iter().chain(changes).copied().collect()
}

/// What is written for this configuration; once that is written, nothing is left to do.
fn wanted(
    config: &NodeConntrack,
    on: &[Setting],
    changes: &[(Setting, u32)],
    cpus: u32,
) -> Vec<(Setting, u32)> {
    let before = on.iter().map(|setting| (*setting, 0)).collect();
    let (settings, machine) = (asks(config), machine(cpus));
    let writes = plan(&settings, &before, &kernel(changes), machine);
    let wanted: Vec<_> = writes.iter().map(|write| (write.setting, write.wanted)).collect();
    let after = kernel(changes).into_iter().chain(wanted.iter().copied()).collect();
    assert_eq!(plan(&settings, &before, &after, machine), []);
    wanted
}

#[test]
fn ct_10_1_to_12_the_size_of_the_table() {
    // Name; entries per processor, least size, processors; size and buckets there; size and buckets written.
    for (name, (max_per_core, min, cpus), (max, buckets), expected) in [
        ("1 nothing configured", (0, 0, 4), (65_536, 16_384), [None, None]),
        ("2 a size per processor", (50_000, 0, 4), (65_536, 16_384), [Some(200_000), Some(50_000)]),
        ("3 the least size is larger", (50_000, 300_000, 4), (65_536, 16_384), [Some(300_000), Some(75_000)]),
        ("4 the least size is smaller", (50_000, 9_000, 4), (65_536, 16_384), [Some(200_000), Some(50_000)]),
        ("5 per processor 0 leaves it", (0, 300_000, 4), (65_536, 16_384), [None, None]),
        ("6 it has that size", (16_384, 0, 4), (65_536, 16_384), [None, None]),
        ("7 it is larger, and is not lowered", (16_384, 0, 4), (100_000, 16_384), [None, None]),
        ("8 it is smaller", (16_384, 0, 4), (65_535, 16_384), [Some(65_536), None]),
        ("9 there are enough buckets", (50_000, 0, 4), (65_536, 50_000), [Some(200_000), None]),
        ("10 only buckets are missing", (50_000, 0, 4), (200_000, 16_384), [None, Some(50_000)]),
        ("11 the largest size", (50_000, 0, 64), (65_536, 16_384), [Some(1_048_576), Some(262_144)]),
        ("12 it limits the least one", (1, 4_000_000, 1), (65_536, 262_144), [Some(1_048_576), None]),
        ("no overflow", (u32::MAX, u32::MAX, u32::MAX), (1_048_576, 262_144), [None, None]),
    ] {
        let config = NodeConntrack { max_per_core, min, ..NOTHING };
        let there = [(Setting::Max, max), (Setting::HashSize, buckets)];
        let expected: Vec<_> = [Setting::Max, Setting::HashSize]
            .into_iter()
            .zip(expected)
            .filter_map(|(setting, value)| Some((setting, value?)))
            .collect();
        assert_eq!(wanted(&config, &[], &there, cpus), expected, "{name}");
    }
}

#[test]
fn ct_10_13_to_19_timeouts_and_liberal() {
    let established = |seconds| NodeConntrack { tcp_established_timeout_seconds: seconds, ..NOTHING };
    let liberal = NodeConntrack { tcp_be_liberal: true, ..NOTHING };
    let is_liberal = (Setting::TcpBeLiberal, 1);
    for (name, config, there, expected) in [
        ("13", established(86_400), None, Some((Setting::TcpEstablishedTimeout, 86_400))),
        ("14 has it", established(432_000), None, None),
        (
            "15",
            NodeConntrack { tcp_close_wait_timeout_seconds: 3_600, ..NOTHING },
            None,
            Some((Setting::TcpCloseWaitTimeout, 3_600)),
        ),
        ("16", NodeConntrack { udp_timeout_seconds: 10, ..NOTHING }, None, Some((Setting::UdpTimeout, 10))),
        (
            "17",
            NodeConntrack { udp_stream_timeout_seconds: 600, ..NOTHING },
            None,
            Some((Setting::UdpStreamTimeout, 600)),
        ),
        ("18", liberal, None, Some(is_liberal)),
        ("19 has it", liberal, Some(is_liberal), None),
        ("not liberal, and not ours", NOTHING, Some(is_liberal), None),
    ] {
        let there = Vec::from_iter(there);
        assert_eq!(wanted(&config, &[], &there, 4), Vec::from_iter(expected), "{name}");
    }
}

#[test]
fn ct_10_the_defaults_and_live_changes() {
    let defaults = [
        (Setting::Max, 131_072),
        (Setting::HashSize, 32_768),
        (Setting::TcpEstablishedTimeout, 86_400),
        (Setting::TcpCloseWaitTimeout, 3_600),
    ];
    assert_eq!(wanted(&DEFAULTS, &[], &[], 2), defaults);
    // Off again, because it was on by us.
    let there = [(Setting::TcpBeLiberal, 1)];
    assert_eq!(wanted(&NOTHING, &[Setting::TcpBeLiberal], &there, 2), [(Setting::TcpBeLiberal, 0)]);
    assert_eq!(wanted(&NOTHING, &[], &there, 2), []);
    // A smaller table and a timeout of 0 leave what was written before.
    let smaller = NodeConntrack { max_per_core: 1, min: 1, ..NOTHING };
    assert_eq!(wanted(&smaller, &[], &defaults, 2), []);
}

/// A directory with the kernel's files.
fn root(values: &[(Setting, u32)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for (setting, value) in values {
        let path = root.path().join(setting.path());
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{value}\n")).unwrap();
    }
    root
}

#[test]
fn ct_10_values_are_written_and_read_back() {
    let root = root(&KERNEL);
    assert_eq!(read(root.path()), kernel(&[]));
    let mut sysctls = Sysctls::new(root.path());
    let mut reconcile = |config: &NodeConntrack| sysctls.reconcile(&asks(config), machine(2));
    let applied = reconcile(&DEFAULTS);
    assert_eq!((applied.written.len(), applied.failed.len()), (4, 0));
    assert_eq!(applied.written[0], Write { setting: Setting::Max, current: Some(65_536), wanted: 131_072 });
    assert_eq!(read(root.path())[&Setting::TcpCloseWaitTimeout], 3_600);
    assert_eq!(reconcile(&DEFAULTS), Applied::default());
    // A live change.
    let changed = NodeConntrack { tcp_be_liberal: true, udp_timeout_seconds: 10, ..DEFAULTS };
    assert_eq!(reconcile(&changed).written.len(), 2);
    assert_eq!(reconcile(&DEFAULTS).written.len(), 1);
    assert_eq!(read(root.path())[&Setting::TcpBeLiberal], 0);
    assert_eq!(read(root.path())[&Setting::UdpTimeout], 10);
    // One of somebody else.
    std::fs::write(root.path().join(Setting::TcpCloseWaitTimeout.path()), "5").unwrap();
    let differing = sysctls.differing(&asks(&DEFAULTS), machine(2));
    let differing: Vec<String> = differing.iter().map(ToString::to_string).collect();
    assert_eq!(differing, ["net.netfilter.nf_conntrack_tcp_timeout_close_wait is 5, should be 3600"]);
}

#[test]
fn ct_10_a_failure_is_named_and_stops_nothing() {
    let root = root(&KERNEL[1..]);
    let refused = root.path().join(Setting::HashSize.path());
    fs::remove_file(&refused).unwrap();
    fs::create_dir(&refused).unwrap();
    let applied = Sysctls::new(root.path()).reconcile(&asks(&DEFAULTS), machine(2));
    assert_eq!(applied.written.len(), 2, "the timeouts");
    let said: Vec<_> = applied.failed.iter().map(ToString::to_string).collect();
    assert_eq!(
        said[0],
        "net.netfilter.nf_conntrack_max is unknown, should be 131072: the kernel does not have this setting; load \
         the kernel module nf_conntrack on the node"
    );
    assert!(
        said[1].starts_with("net.netfilter.nf_conntrack_buckets is unknown, should be 32768"),
        "{said:?}"
    );
    assert!(!root.path().join(Setting::Max.path()).exists(), "a setting is never created");
}

#[test]
fn ct_10_an_unprivileged_container_says_who_writes() {
    for kind in [io::ErrorKind::ReadOnlyFilesystem, io::ErrorKind::PermissionDenied] {
        let write = Write { setting: Setting::UdpTimeout, current: Some(30), wanted: 10 };
        let said = WriteError { write, cause: Cause::new(Setting::UdpTimeout, &kind.into()) }.to_string();
        assert_eq!(
            said,
            "net.netfilter.nf_conntrack_udp_timeout is 30, should be 10: not writable from here; mount the node's \
             /proc/sys/net as the chart does, or set it on the node"
        );
    }
}

#[test]
fn processors_are_counted() {
    for (list, expected) in [
        ("0\n", Some(1)),
        ("0-3\n", Some(4)),
        ("0-3,8,10-11", Some(7)),
        ("", None),
        ("3-1", None),
        ("a-b", None),
        ("0-4294967295", None),
    ] {
        assert_eq!(count_cpus(list), expected, "{list:?}");
    }
    assert!(Machine::this().cpus >= 1);
}

const IPVS: [(Setting, u32); 4] = [
    (Setting::IpvsConntrack, 1),
    (Setting::IpvsExpireNodestConn, 1),
    (Setting::IpvsExpireQuiescentTemplate, 1),
    (Setting::IpForward, 1),
];

fn mode_ipvs(strict_arp: bool) -> Settings {
    Settings { ipvs: Some(Ipvs { strict_arp }), ..asks(&NOTHING) }
}

#[test]
fn ipvs_settings_by_the_kernels_version() {
    for (kernel, reuse) in
        [((4, 0), None), ((4, 1), Some(0)), ((5, 8), Some(0)), ((5, 9), None), ((6, 18), None)]
    {
        let machine = Machine { cpus: 2, kernel };
        let current = KERNEL.into_iter().collect();
        let writes = |settings: &Settings| {
            let writes = plan(settings, &Current::new(), &current, machine);
            writes.into_iter().map(|write| (write.setting, write.wanted)).collect::<Vec<_>>()
        };
        let expected: Vec<_> =
            IPVS.into_iter().chain(reuse.map(|value| (Setting::IpvsConnReuseMode, value))).collect();
        assert_eq!(writes(&mode_ipvs(false)), expected, "{kernel:?}");
        let arp = [(Setting::ArpIgnore, 1), (Setting::ArpAnnounce, 2)];
        assert_eq!(writes(&mode_ipvs(true)), [arp.as_slice(), &expected].concat(), "{kernel:?}");
        assert_eq!(writes(&asks(&NOTHING)), [], "in other modes");
    }
    for (release, version) in
        [("6.1.0-13-amd64\n", (6, 1)), ("5.9", (5, 9)), ("4.19.0+", (4, 19)), ("", (0, 0))]
    {
        assert_eq!(kernel_version(release), version, "{release:?}");
    }
}

#[test]
fn ipvs_settings_stay_but_strict_arp_is_taken_back() {
    let root = root(&KERNEL);
    let mut sysctls = Sysctls::new(root.path());
    assert_eq!(sysctls.prepare_ipvs(machine(2)).written.len(), 4);
    assert_eq!(sysctls.prepare_ipvs(machine(2)), Applied::default());
    fs::write(root.path().join(Setting::ArpAnnounce.path()), "1").unwrap();
    assert_eq!(sysctls.reconcile(&mode_ipvs(true), machine(2)).written.len(), 2);
    let _ = sysctls.reconcile(&asks(&NOTHING), machine(2));
    let now = read(root.path());
    assert_eq!((now[&Setting::ArpIgnore], now[&Setting::ArpAnnounce]), (0, 1), "as before");
    assert!(IPVS.into_iter().all(|(setting, value)| now[&setting] == value), "{now:?}");
    // What somebody else has set, stricter or not, is left.
    fs::write(root.path().join(Setting::ArpIgnore.path()), "2").unwrap();
    let _ = sysctls.reconcile(&mode_ipvs(true), machine(2));
    let _ = sysctls.reconcile(&mode_ipvs(false), machine(2));
    let now = read(root.path());
    assert_eq!((now[&Setting::ArpIgnore], now[&Setting::ArpAnnounce]), (2, 1));
}

#[test]
fn ipvs_a_setting_that_is_missing_names_its_module() {
    let root = root(&KERNEL[..8]);
    let failed = Sysctls::new(root.path()).prepare_ipvs(machine(2)).failed;
    assert!(failed[0].to_string().contains("kernel module ip_vs"), "{}", failed[0]);
}
