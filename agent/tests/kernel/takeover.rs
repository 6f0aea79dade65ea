//! What kube-proxy's modes nftables and ipvs have left: gone once our rules are in, and nothing else is.

use pointsman_agent::iptables::{Flavour, Tools};
use pointsman_agent::takeover::{Known, Left, Takeover};
use pointsman_crds::settings::IptablesBackend;

use crate::lifecycle::{BOTH, loaded};
use crate::support::lab::{Lab, shell};
use crate::support::traffic::Answer;
use crate::support::world::block_on;
use crate::support::world::cluster_ip;

/// Takes over in the node's namespace, as the agent does.
fn take_over(lab: &Lab, flavour: Flavour) -> Left {
    let backend = match flavour {
        Flavour::Nft => IptablesBackend::NFT,
        Flavour::Legacy => IptablesBackend::Legacy,
    };
    lab.run("node", move || {
        block_on(async {
            let tools = Tools::detect(backend).await.unwrap();
            Takeover::default().remove(Some(&tools), &Known::default()).await.unwrap()
        })
    })
}

/// As kube-proxy in mode nftables leaves it, for one Service that leads nowhere any more.
fn as_nftables_mode(lab: &Lab) {
    lab.node(
        "nft -f - <<EOF
         table ip kube-proxy {
           map service-ips { type ipv4_addr . inet_proto . inet_service : verdict; }
           chain nat-prerouting { type nat hook prerouting priority -100; ip daddr . meta l4proto . th dport vmap @service-ips; }
           chain service-A { meta l4proto tcp dnat to 10.244.9.9:80; }
         }
         add element ip kube-proxy service-ips { 172.30.0.80 . tcp . 80 : goto service-A }
         table ip6 kube-proxy { chain services { }; }
         table ip mine { chain kube-proxy { }; }
         table inet kube-proxy { chain other { }; }
EOF",
    );
}

#[test]
fn syn_17_tables_of_mode_nftables_are_removed_and_no_others() {
    for flavour in BOTH {
        let Some(lab) = Lab::new() else { return };
        as_nftables_mode(&lab);
        assert_eq!(lab.tcp("client", cluster_ip()), Answer::Refused, "it leads nowhere");
        let mut world = loaded(&lab, flavour);
        world.settle();
        assert_eq!(take_over(&lab, flavour), Left::Nothing);
        assert!(matches!(lab.tcp("client", cluster_ip()), Answer::From(..)));
        let tables = lab.node("nft list tables");
        assert!(!tables.contains("ip kube-proxy") && !tables.contains("ip6 kube-proxy"), "{tables}");
        assert!(tables.contains("ip mine") && tables.contains("inet kube-proxy"), "{tables}");
        // Nothing there is no error.
        assert_eq!(take_over(&lab, flavour), Left::Nothing);
        assert_eq!(world.differences(), Vec::<String>::new());
    }
}

/// As kube-proxy in mode ipvs leaves it, but for the virtual servers, and with a device of another type: not every kernel has
/// the right one.
fn as_ipvs_mode(lab: &Lab, flavour: Flavour) {
    lab.node(
        "ip link add kube-ipvs0 type veth peer name other0; ip addr add 172.30.0.80/32 dev kube-ipvs0; ip addr add fd00:ac:1e::50/128 dev kube-ipvs0
         ip link add kube-ipvs1 type veth peer name other1
         ipset create OTHER hash:ip; ipset create KUBE-DST-VBH27M7NWLDOZIE6 hash:ip",
    );
    for (tool, infix, family) in [("iptables", "", "inet"), ("ip6tables", "6-", "inet6")] {
        lab.node(&format!(
            "ipset create KUBE-{infix}CLUSTER-IP hash:ip,port family {family}; ipset create KUBE-{infix}IPVS-IPS hash:ip family {family}
             ipset create KUBE-{infix}LOOP-BACK hash:ip,port,ip family {family}
             {tool}-{flavour}-restore --noflush <<EOF
*filter
:KUBE-IPVS-FILTER - [0:0]
:KUBE-IPVS-OUT-FILTER - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-SOURCE-RANGES-FIREWALL - [0:0]
:OTHER - [0:0]
-A INPUT -j KUBE-IPVS-FILTER
-A INPUT -j OTHER
-A INPUT -m comment --comment \"kubernetes health check rules\" -j KUBE-NODE-PORT
-A OUTPUT -j KUBE-IPVS-OUT-FILTER
-A KUBE-IPVS-FILTER -m set --match-set KUBE-{infix}CLUSTER-IP dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m conntrack --ctstate NEW -m set --match-set KUBE-{infix}IPVS-IPS dst -j REJECT
-A KUBE-PROXY-FIREWALL -j KUBE-SOURCE-RANGES-FIREWALL
COMMIT
*nat
:KUBE-SERVICES - [0:0]
:KUBE-LOAD-BALANCER - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-POSTROUTING - [0:0]
-A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
-A KUBE-SERVICES -m set --match-set KUBE-{infix}CLUSTER-IP dst,dst -j ACCEPT
-A KUBE-POSTROUTING -m set --match-set KUBE-{infix}LOOP-BACK dst,dst,src -j MASQUERADE
COMMIT
EOF"
        ));
    }
}

#[test]
fn syn_17_device_chains_and_sets_of_mode_ipvs_are_removed_and_no_others() {
    for flavour in BOTH {
        let Some(lab) = Lab::new() else { return };
        as_ipvs_mode(&lab, flavour);
        let mut world = loaded(&lab, flavour);
        world.settle();
        // New connections are ours although the addresses are still local.
        assert!(matches!(lab.tcp("client", cluster_ip()), Answer::From(..)));
        let mut held = lab.stream("client", cluster_ip());
        assert_eq!(take_over(&lab, flavour), Left::Nothing);
        assert!(held.answers());
        let links = lab.node("ip -o link");
        assert!(!links.contains("kube-ipvs0@") && links.contains("kube-ipvs1@"), "{links}");
        let sets = lab.node("ipset list -name");
        for set in ["OTHER", "KUBE-DST-VBH27M7NWLDOZIE6", "POINTSMAN-CLUSTER-IPS"] {
            assert!(sets.lines().any(|line| line == set), "{set} in {sets}");
        }
        assert_eq!(sets.matches("KUBE-").count(), 1, "{sets}");
        let saved = shell(&format!(
            "nsenter --net=/run/netns/{} sh -c 'iptables-{flavour}-save; ip6tables-{flavour}-save'",
            lab.namespace("node")
        ));
        for chain in ["IPVS", "KUBE-NODE-PORT ", "KUBE-LOAD-BALANCER", "KUBE-SOURCE-RANGES"] {
            assert!(!saved.contains(chain), "{chain} in {saved}");
        }
        assert_eq!(saved.matches("-A INPUT -j OTHER").count(), 2);
        assert_eq!(world.differences(), Vec::<String>::new());
        assert!(matches!(lab.tcp("client", cluster_ip()), Answer::From(..)));
        assert_eq!(take_over(&lab, flavour), Left::Nothing);
    }
}
