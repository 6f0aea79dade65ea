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

/// What a kernel may have.
const KERNEL: [(Setting, u32); 7] = [
    (Setting::Max, 65_536),
    (Setting::HashSize, 16_384),
    (Setting::TcpEstablishedTimeout, 432_000),
    (Setting::TcpCloseWaitTimeout, 60),
    (Setting::TcpBeLiberal, 0),
    (Setting::UdpTimeout, 30),
    (Setting::UdpStreamTimeout, 120),
];

fn kernel(changes: &[(Setting, u32)]) -> Current {
    KERNEL.iter().chain(changes).copied().collect()
}

#[test]
fn ct_10_what_is_written() {
    use Setting::{
        HashSize, Max, TcpBeLiberal, TcpCloseWaitTimeout, TcpEstablishedTimeout, UdpStreamTimeout, UdpTimeout,
    };
    let sized = |max_per_core, min| NodeConntrack { max_per_core, min, ..NOTHING };
    type Case<'a> =
        (&'a str, NodeConntrack, Option<NodeConntrack>, &'a [(Setting, u32)], u32, &'a [(Setting, u32)]);
    let liberal = NodeConntrack { tcp_be_liberal: true, ..NOTHING };
    let cases: &[Case<'_>] = &[
        ("1 nothing configured", NOTHING, None, &[], 4, &[]),
        ("2 a size per processor", sized(50_000, 0), None, &[], 4, &[(Max, 200_000), (HashSize, 50_000)]),
        (
            "3 the least size is larger",
            sized(50_000, 300_000),
            None,
            &[],
            4,
            &[(Max, 300_000), (HashSize, 75_000)],
        ),
        (
            "4 the least size is smaller",
            sized(50_000, 100_000),
            None,
            &[],
            4,
            &[(Max, 200_000), (HashSize, 50_000)],
        ),
        ("5 per processor 0 leaves it, whatever the least", sized(0, 300_000), None, &[], 4, &[]),
        ("6 it has that size", sized(16_384, 0), None, &[], 4, &[]),
        ("7 it is larger, and is not lowered", sized(16_384, 0), None, &[(Max, 100_000)], 4, &[]),
        ("8 it is smaller", sized(16_384, 0), None, &[(Max, 65_535)], 4, &[(Max, 65_536)]),
        ("9 buckets suffice", sized(50_000, 0), None, &[(HashSize, 50_000)], 4, &[(Max, 200_000)]),
        ("10 buckets are missing alone", sized(50_000, 0), None, &[(Max, 200_000)], 4, &[(HashSize, 50_000)]),
        ("11 the largest size", sized(50_000, 0), None, &[], 64, &[(Max, 1_048_576), (HashSize, 262_144)]),
        (
            "12 the largest size limits the least one",
            sized(1, 4_000_000),
            None,
            &[],
            1,
            &[(Max, 1_048_576), (HashSize, 262_144)],
        ),
        (
            "13 established timeout",
            NodeConntrack { tcp_established_timeout_seconds: 86_400, ..NOTHING },
            None,
            &[],
            4,
            &[(TcpEstablishedTimeout, 86_400)],
        ),
        (
            "14 established timeout is right",
            NodeConntrack { tcp_established_timeout_seconds: 432_000, ..NOTHING },
            None,
            &[],
            4,
            &[],
        ),
        (
            "15 close-wait timeout",
            NodeConntrack { tcp_close_wait_timeout_seconds: 3_600, ..NOTHING },
            None,
            &[],
            4,
            &[(TcpCloseWaitTimeout, 3_600)],
        ),
        (
            "16 UDP timeout",
            NodeConntrack { udp_timeout_seconds: 10, ..NOTHING },
            None,
            &[],
            4,
            &[(UdpTimeout, 10)],
        ),
        (
            "17 UDP stream timeout",
            NodeConntrack { udp_stream_timeout_seconds: 600, ..NOTHING },
            None,
            &[],
            4,
            &[(UdpStreamTimeout, 600)],
        ),
        ("18 liberal", liberal, None, &[], 4, &[(TcpBeLiberal, 1)]),
        ("19 liberal already", liberal, None, &[(TcpBeLiberal, 1)], 4, &[]),
        ("live: not liberal any more", NOTHING, Some(liberal), &[(TcpBeLiberal, 1)], 4, &[(TcpBeLiberal, 0)]),
        ("live: liberal by somebody else", NOTHING, Some(NOTHING), &[(TcpBeLiberal, 1)], 4, &[]),
        (
            "live: a smaller size is not written",
            sized(10_000, 0),
            Some(sized(50_000, 0)),
            &[(Max, 200_000), (HashSize, 50_000)],
            4,
            &[],
        ),
        (
            "live: a timeout of 0 leaves the one from before",
            NOTHING,
            Some(DEFAULTS),
            &[(TcpCloseWaitTimeout, 3_600)],
            4,
            &[],
        ),
        (
            "the defaults",
            DEFAULTS,
            None,
            &[],
            2,
            &[
                (Max, 131_072),
                (HashSize, 32_768),
                (TcpEstablishedTimeout, 86_400),
                (TcpCloseWaitTimeout, 3_600),
            ],
        ),
        (
            "no overflow",
            sized(u32::MAX, u32::MAX),
            None,
            &[],
            u32::MAX,
            &[(Max, 1_048_576), (HashSize, 262_144)],
        ),
    ];
    for (name, config, previous, changes, cpus, expected) in cases {
        let writes = plan(config, previous.as_ref(), &kernel(changes), *cpus);
        let wanted: Vec<_> = writes.iter().map(|write| (write.setting, write.wanted)).collect();
        assert_eq!(wanted, *expected, "{name}");
        // Once written, nothing is left to do.
        let after = kernel(changes).into_iter().chain(wanted).collect();
        assert_eq!(plan(config, previous.as_ref(), &after, *cpus), [], "{name}");
    }
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
    let applied = reconcile(root.path(), &DEFAULTS, None, 2);
    assert_eq!((applied.written.len(), applied.failed.len()), (4, 0));
    assert_eq!(applied.written[0], Write { setting: Setting::Max, current: Some(65_536), wanted: 131_072 });
    assert_eq!(read(root.path())[&Setting::TcpCloseWaitTimeout], 3_600);
    assert_eq!(reconcile(root.path(), &DEFAULTS, None, 2), Applied::default());
    // A live change.
    let changed = NodeConntrack { tcp_be_liberal: true, udp_timeout_seconds: 10, ..DEFAULTS };
    assert_eq!(reconcile(root.path(), &changed, Some(&DEFAULTS), 2).written.len(), 2);
    assert_eq!(reconcile(root.path(), &DEFAULTS, Some(&changed), 2).written.len(), 1);
    assert_eq!(read(root.path())[&Setting::TcpBeLiberal], 0);
    assert_eq!(read(root.path())[&Setting::UdpTimeout], 10);
}

#[test]
fn ct_10_a_failure_is_named_and_stops_nothing() {
    let root = root(&KERNEL[1..]);
    let refused = root.path().join(Setting::HashSize.path());
    fs::remove_file(&refused).unwrap();
    fs::create_dir(&refused).unwrap();
    let applied = reconcile(root.path(), &DEFAULTS, None, 2);
    assert_eq!(applied.written.len(), 2, "the timeouts");
    let said: Vec<_> = applied.failed.iter().map(ToString::to_string).collect();
    assert_eq!(
        said[0],
        "net.netfilter.nf_conntrack_max is unknown, should be 131072: the kernel does not have this setting; load \
         the kernel module nf_conntrack on the node"
    );
    assert!(
        said[1].starts_with("/sys/module/nf_conntrack/parameters/hashsize is unknown, should be 32768"),
        "{said:?}"
    );
    assert!(!root.path().join(Setting::Max.path()).exists(), "a setting is never created");
}

#[test]
fn ct_10_an_unprivileged_container_says_who_writes() {
    for kind in [io::ErrorKind::ReadOnlyFilesystem, io::ErrorKind::PermissionDenied] {
        let write = Write { setting: Setting::UdpTimeout, current: Some(30), wanted: 10 };
        let said = WriteError { write, cause: io::Error::from(kind).into() }.to_string();
        assert_eq!(
            said,
            "net.netfilter.nf_conntrack_udp_timeout is 30, should be 10: not writable from here; the pod's init \
             container writes it, so restart the pod"
        );
    }
}

#[test]
fn the_number_of_buckets_is_known_without_root() {
    let root = root(&KERNEL[..1]);
    fs::write(root.path().join("proc/sys/net/netfilter/nf_conntrack_buckets"), "262144\n").unwrap();
    assert_eq!(read(root.path())[&Setting::HashSize], 262_144);
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
    let root = root(&[]);
    assert!(cpus(root.path()) >= 1, "without the file");
    fs::create_dir_all(root.path().join("sys/devices/system/cpu")).unwrap();
    fs::write(root.path().join("sys/devices/system/cpu/online"), "0-63\n").unwrap();
    assert_eq!(cpus(root.path()), 64);
}
