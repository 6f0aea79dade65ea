//! From what a file says to changes and packets in both families.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use pointsman_agent::model::{
    Change, NodeFacts, ObjectName, Protocol, family_of, parse_address, parse_network,
};
use pointsman_crds::NodeProxyConfiguration;
use pointsman_crds::proxy_configuration::Drift;
use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::{Mode, ProxySettings};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::file::{self, File, Get, Row, ServiceFile, SliceFile, Source};
use super::hosts::{self, Host, NODES};
use super::{Case, End, Expected, Scenario, Step, Sticky, Stream};

const FAMILIES: [IpFamily; 2] = [IpFamily::IPv4, IpFamily::IPv6];
const NAMESPACE: &str = "ns";
const DEFAULT_PORT: u16 = 8080;

/// What a scenario has said so far.
#[derive(Default)]
struct Said {
    services: BTreeMap<String, Value>,
    /// Slices by the name in the file, with the names of the objects made of them.
    slices: BTreeMap<String, Vec<String>>,
    config: Option<NodeProxyConfiguration>,
}

pub(super) fn expand(name: &str, file: File) -> Result<Scenario, String> {
    let own: Vec<IpAddr> = FAMILIES.into_iter().flat_map(hosts::node_addresses).collect();
    let more: Vec<IpAddr> = with_twins(&file.node_addresses)?
        .iter()
        .map(|text| parse_address(text).ok_or_else(|| format!("nodeAddresses: {text} is no address")))
        .collect::<Result<_, _>>()?;
    let start = vec![
        node(file::Node::default())?,
        Change::ServiceCidrs(hosts::both(hosts::SERVICE_CIDR).to_vec()),
        Change::LocalAddresses(own.into_iter().chain(more.iter().copied()).collect()),
    ];
    let mut said = Said { config: Some(config(&json!({}))?), ..Said::default() };
    let mut steps: Vec<Step> = Vec::new();
    for step in file.steps {
        let what = step.what.clone();
        if steps.iter().any(|other| other.what == what) {
            return Err(format!("step {what:?} is there twice; name each for what it shows"));
        }
        steps.push(said.step(step).map_err(|error| format!("step {what:?}: {error}"))?);
    }
    Ok(Scenario { name: name.to_owned(), start, more_addresses: more, steps })
}

fn node(node: file::Node) -> Result<Change, String> {
    Ok(Change::Node(NodeFacts {
        name: NODES[0].to_owned(),
        addresses: FAMILIES.iter().map(|family| hosts::node_addresses(*family)[0]).collect(),
        pod_cidrs: match node.pod_cidrs {
            None => hosts::both(hosts::POD_CIDRS[0]).to_vec(),
            Some(blocks) => networks(&blocks)?,
        },
        zone: node.zone,
    }))
}

fn networks(blocks: &[String]) -> Result<Vec<IpNet>, String> {
    let network = |text: &String| parse_network(text).ok_or_else(|| format!("{text:?} is no block"));
    with_twins(blocks)?.iter().map(network).collect()
}

impl Said {
    fn step(&mut self, step: file::Step) -> Result<Step, String> {
        for id in &step.ids {
            let known = id.split_once('-').is_some_and(|(group, number)| {
                group.chars().all(|c| c.is_ascii_uppercase()) && !number.is_empty()
            });
            if !known {
                return Err(format!("ids: {id:?} is not like CIP-1"));
            }
        }
        let mut changes = Vec::new();
        if let Some(facts) = step.node {
            changes.push(node(facts)?);
        }
        if let Some(blocks) = step.service_cidrs {
            changes.push(Change::ServiceCidrs(networks(&blocks)?));
        }
        for object in step.patch {
            let patch: ServiceFile = read(&object)?;
            let known = self.services.get(&patch.service);
            let known = known.ok_or_else(|| format!("patch: {} was not applied before", patch.service))?;
            let mut merged = known.clone();
            for (key, value) in [("spec", patch.spec), ("status", patch.status), ("labels", patch.labels)] {
                if !value.is_null() {
                    merge(&mut merged[key], value);
                }
            }
            self.service(merged, &mut changes)?;
        }
        for object in step.apply {
            self.apply(object, &mut changes)?;
        }
        for name in step.delete {
            let (kind, name) = name
                .split_once(' ')
                .ok_or_else(|| format!("delete: {name:?} is not like `service web` or `endpoints web`"))?;
            match (kind, self.services.remove(name).is_some() && kind == "service", self.slices.remove(name))
            {
                ("service", true, slices) => {
                    changes.push(Change::ServiceDeleted(ObjectName::new(NAMESPACE, name)));
                    self.slices.extend(slices.map(|slices| (name.to_owned(), slices)));
                }
                ("endpoints", _, Some(slices)) => changes.extend(
                    slices
                        .iter()
                        .map(|slice| Change::SliceDeleted(ObjectName::new(NAMESPACE, slice.as_str()))),
                ),
                _ => return Err(format!("delete: there is no {kind} {name}")),
            }
        }
        if let Some(settings) = step.config {
            self.config = Some(config(&settings)?);
        }
        let mut cases = Vec::new();
        for (number, row) in step.expect.iter().enumerate() {
            expand_row(number, row, &mut cases)
                .map_err(|error| format!("line {} of expect: {error}", number + 1))?;
        }
        let config = self.config.clone().ok_or("no configuration")?;
        let mut streams = Vec::new();
        for row in &step.streams {
            for name in row.from.list() {
                let from = Host::named(name).ok_or_else(|| format!("streams: there is no {name}"))?;
                for to in row.to.list() {
                    let (addresses, protocol) = destination(to)?;
                    if protocol != Protocol::Tcp {
                        return Err(format!("streams: {to:?} is not TCP"));
                    }
                    streams.extend(addresses.into_iter().map(|to| Stream { from, to }));
                }
            }
        }
        let cut = step.cut.iter().map(|cut| cut.mode).collect();
        Ok(Step { what: step.what, changes, config, wait_seconds: step.wait_seconds, cases, streams, cut })
    }

    fn apply(&mut self, object: Value, changes: &mut Vec<Change>) -> Result<(), String> {
        if object.get("service").is_some() {
            self.service(object, changes)
        } else if object.get("endpoints").is_some() {
            self.slice(&object, changes)
        } else {
            Err(format!("apply: {object} is neither a `service` nor `endpoints`"))
        }
    }

    fn service(&mut self, object: Value, changes: &mut Vec<Change>) -> Result<(), String> {
        let mut service: ServiceFile = read(&object)?;
        if service.spec.get("ipFamilies").is_none() {
            for key in ["clusterIPs", "externalIPs", "loadBalancerSourceRanges"] {
                twin_list(service.spec.get_mut(key))?;
            }
            twin_ingress(service.status.pointer_mut("/loadBalancer/ingress"))?;
        }
        let whole = json!({
            "metadata": {"namespace": NAMESPACE, "name": service.service, "labels": service.labels},
            "spec": service.spec,
            "status": service.status,
        });
        changes.push(Change::ServiceApplied(Box::new(strict::<Service>(whole)?)));
        self.services.insert(service.service, object);
        Ok(())
    }

    fn slice(&mut self, object: &Value, changes: &mut Vec<Change>) -> Result<(), String> {
        let slice: SliceFile = read(object)?;
        let name = slice.name.clone().unwrap_or_else(|| slice.endpoints.clone());
        let ports = match slice.ports {
            Some(ports) => ports,
            None => self.ports_of(&slice.endpoints),
        };
        let mut made = Vec::new();
        for family in FAMILIES {
            let word = format!("{family:?}");
            if slice
                .address_type
                .as_ref()
                .is_some_and(|own| *own != word && FAMILIES.iter().any(|f| format!("{f:?}") == *own))
            {
                continue;
            }
            let address_type = slice.address_type.clone().unwrap_or_else(|| word.clone());
            let mut labels = slice.labels.clone();
            labels.entry("kubernetes.io/service-name").or_insert_with(|| json!(slice.endpoints));
            let endpoints: Vec<Value> =
                slice.to.iter().map(|entry| endpoint(entry, family)).collect::<Result<_, _>>()?;
            let object_name = format!("{name}-{}", word.to_lowercase());
            let whole = json!({
                "metadata": {"namespace": NAMESPACE, "name": object_name, "labels": labels},
                "addressType": address_type,
                "ports": ports,
                "endpoints": endpoints,
            });
            changes.push(Change::SliceApplied(Box::new(strict::<EndpointSlice>(whole)?)));
            made.push(object_name);
        }
        self.slices.insert(name, made);
        Ok(())
    }

    fn ports_of(&self, service: &str) -> Value {
        let ports = self.services.get(service).and_then(|service| service.pointer("/spec/ports"));
        let ports = ports.and_then(Value::as_array).into_iter().flatten();
        ports
            .map(|port| {
                json!({
                    "name": port.get("name").cloned().unwrap_or_else(|| json!("")),
                    "protocol": port.get("protocol").cloned().unwrap_or_else(|| json!("TCP")),
                    "port": DEFAULT_PORT,
                })
            })
            .collect()
    }
}

/// An endpoint: Kubernetes' own form, or `name [unready|terminating|gone] [zones=a,b] [nodes=x,y] [on=node]`.
fn endpoint(entry: &Value, family: IpFamily) -> Result<Value, String> {
    let Some(text) = entry.as_str() else {
        let mut object = entry.clone();
        if let Some(addresses) = object.get_mut("addresses").and_then(Value::as_array_mut) {
            for address in addresses {
                let text = address.as_str().unwrap_or_default().to_owned();
                *address = json!(match Host::named(&text) {
                    Some(host) => host.address(family).to_string(),
                    None => in_family(&text, family).unwrap_or(text),
                });
            }
        }
        return Ok(object);
    };
    let mut words = text.split_whitespace();
    let name = words.next().unwrap_or_default();
    let host = Host::named(name).filter(|host| host.node.is_some());
    let host = host.ok_or_else(|| format!("endpoints: {name} is nobody that can be an endpoint"))?;
    let mut object = json!({
        "addresses": [host.address(family)],
        "nodeName": host.node.map(|node| NODES[node]),
    });
    for word in words {
        let names = |list: &str| list.split(',').map(|name| json!({"name": name})).collect::<Value>();
        let conditions = |ready: bool, serving: bool, terminating: bool| json!({"ready": ready, "serving": serving, "terminating": terminating});
        match word.split_once('=') {
            None if word == "unready" => object["conditions"] = conditions(false, false, false),
            None if word == "terminating" => object["conditions"] = conditions(false, true, true),
            None if word == "gone" => object["conditions"] = conditions(false, false, true),
            Some(("zones", list)) => object["hints"]["forZones"] = names(list),
            Some(("nodes", list)) => object["hints"]["forNodes"] = names(list),
            Some(("on", node)) => object["nodeName"] = json!(node),
            _ => return Err(format!("endpoints: {word:?} in {text:?} is not known")),
        }
    }
    Ok(object)
}

fn config(settings: &Value) -> Result<NodeProxyConfiguration, String> {
    let mut settings = settings.clone();
    let listed = settings.get_mut("nodePortAddresses").and_then(Value::as_array_mut);
    if let Some(list) = listed {
        let words: Vec<String> =
            list.iter().filter_map(|entry| entry.as_str().map(ToOwned::to_owned)).collect();
        *list = with_twins(&words)?.into_iter().map(Value::String).collect();
    }
    twin_list(settings.pointer_mut("/detectLocal/clusterCIDRs"))?;
    let mut settings: ProxySettings = strict(settings)?;
    settings.mode.get_or_insert(Mode::Iptables);
    NodeProxyConfiguration::complete(&settings, Drift::default()).map_err(|error| error.to_string())
}

fn read<T: DeserializeOwned>(value: &Value) -> Result<T, String> {
    T::deserialize(value).map_err(|error| format!("{value}: {error}"))
}

/// Reads an object that ignores what it does not know, and says what that was.
fn strict<T: DeserializeOwned + Serialize>(mut value: Value) -> Result<T, String> {
    drop_nulls(&mut value);
    let object: T = read(&value)?;
    let back = serde_json::to_value(&object).map_err(|error| error.to_string())?;
    match lost(&value, &back, "") {
        None => Ok(object),
        Some(path) => Err(format!("{path} means nothing in {value}")),
    }
}

fn drop_nulls(value: &mut Value) {
    if let Value::Object(object) = value {
        object.retain(|_, value| !value.is_null());
        object.values_mut().for_each(drop_nulls);
    }
}

/// The first key that is in `value` and not in `back`.
fn lost(value: &Value, back: &Value, path: &str) -> Option<String> {
    match (value, back) {
        (Value::Object(value), Value::Object(back)) => value.iter().find_map(|(key, value)| {
            let path = format!("{path}.{key}");
            match back.get(key) {
                Some(back) => lost(value, back, &path),
                None if value.as_array().is_some_and(Vec::is_empty) => None,
                None => Some(path),
            }
        }),
        (Value::Array(value), Value::Array(back)) => {
            value.iter().zip(back).find_map(|(value, back)| lost(value, back, path))
        }
        _ => None,
    }
}

/// JSON merge patch.
fn merge(target: &mut Value, patch: Value) {
    match patch {
        Value::Object(patch) if target.is_object() => {
            for (key, value) in patch {
                if value.is_null() {
                    target.as_object_mut().map(|target| target.remove(&key));
                } else {
                    merge(&mut target[key.as_str()], value);
                }
            }
        }
        patch => *target = patch,
    }
}

/// The list with the IPv6 twin of every IPv4 entry, unless it names IPv6 itself.
fn with_twins(list: &[String]) -> Result<Vec<String>, String> {
    let mut twins = list.to_vec();
    if !list.iter().any(|entry| entry.contains(':')) {
        for entry in list.iter().filter(|entry| entry.contains('.')) {
            twins
                .push(in_family(entry, IpFamily::IPv6).ok_or_else(|| format!("{entry:?} has no IPv6 twin"))?);
        }
    }
    Ok(twins)
}

fn twin_list(list: Option<&mut Value>) -> Result<(), String> {
    let Some(list) = list.and_then(Value::as_array_mut) else { return Ok(()) };
    let words: Vec<String> = list.iter().filter_map(|entry| entry.as_str().map(ToOwned::to_owned)).collect();
    if words.len() == list.len() {
        *list = with_twins(&words)?.into_iter().map(Value::String).collect();
    }
    Ok(())
}

fn twin_ingress(list: Option<&mut Value>) -> Result<(), String> {
    let Some(list) = list.and_then(Value::as_array_mut) else { return Ok(()) };
    let own = |entry: &Value| entry.get("ip").and_then(Value::as_str).unwrap_or_default().to_owned();
    if list.iter().any(|entry| own(entry).contains(':')) {
        return Ok(());
    }
    for mut entry in list.clone() {
        let ip = own(&entry);
        entry["ip"] =
            json!(in_family(&ip, IpFamily::IPv6).ok_or_else(|| format!("{ip:?} has no IPv6 twin"))?);
        list.push(entry);
    }
    Ok(())
}

/// An IPv4 address or block in a family.
fn in_family(text: &str, family: IpFamily) -> Option<String> {
    if family == IpFamily::IPv4 {
        return Some(text.to_owned());
    }
    match (parse_address(text), parse_network(text)) {
        (Some(IpAddr::V4(address)), _) => Some(hosts::twin(address).to_string()),
        (_, Some(IpNet::V4(block))) => Some(hosts::twin_block(block).to_string()),
        _ => None,
    }
}

fn expand_row(number: usize, row: &Row, cases: &mut Vec<Case>) -> Result<(), String> {
    let mut expected = outcome(&row.reach, row.source, row.get, row.sticky)?;
    if let Some(seconds) = row.forget_after_seconds {
        let Expected::Reach { sticky: sticky @ Sticky::Yes, .. } = &mut expected else {
            return Err("`forgetAfterSeconds` goes with `sticky`".to_owned());
        };
        *sticky = Sticky::ForSeconds(seconds);
    }
    let mut unless = Vec::new();
    for other in &row.unless {
        unless.push((other.mode, outcome(&other.reach, other.source, other.get, other.sticky)?));
    }
    for from in row.from.list() {
        let (name, source) =
            from.split_once('@').map_or((from.as_str(), None), |(name, ip)| (name, Some(ip)));
        let host = Host::named(name).ok_or_else(|| format!("from: there is no {name}"))?;
        for to in row.to.list() {
            let (addresses, protocol) = destination(to)?;
            for to in addresses {
                let family = family_of(to.ip());
                if !row.families.is_empty() && !row.families.contains(&family) {
                    continue;
                }
                let source = source.map(|source| {
                    let own = in_family(source, family).and_then(|text| parse_address(&text));
                    own.ok_or_else(|| format!("from: {source:?} is no address"))
                });
                cases.push(Case {
                    family,
                    from: host,
                    source: source.transpose()?,
                    to,
                    protocol,
                    row: number,
                    expected: expected.clone(),
                    unless: unless.clone(),
                });
            }
        }
    }
    Ok(())
}

fn outcome(
    reach: &[String],
    source: Option<Source>,
    get: Option<Get>,
    sticky: bool,
) -> Result<Expected, String> {
    match (reach.is_empty(), get) {
        (true, Some(_)) if source.is_some() || sticky => Err("`as` and `sticky` go with `reach`".to_owned()),
        (true, Some(Get::Refused)) => Ok(Expected::Refused),
        (true, Some(Get::Dropped)) => Ok(Expected::Dropped),
        (true, Some(Get::Untouched)) => Ok(Expected::Untouched),
        (false, None) => {
            let mut ends: Vec<End> = reach.iter().map(|text| end(text, source)).collect::<Result<_, _>>()?;
            ends.sort();
            Ok(Expected::Reach { ends, sticky: if sticky { Sticky::Yes } else { Sticky::No } })
        }
        _ => Err("say either `reach` or `get`".to_owned()),
    }
}

/// `name[:port] [raw|masq]`.
fn end(text: &str, source: Option<Source>) -> Result<End, String> {
    let mut words = text.split_whitespace();
    let target = words.next().unwrap_or_default();
    let (name, port) = target.split_once(':').map_or((target, None), |(name, port)| (name, Some(port)));
    let host = Host::named(name)
        .filter(|host| host.node.is_some())
        .ok_or_else(|| format!("reach: {name} is nobody that can be an endpoint"))?;
    let port =
        port.map_or(Ok(DEFAULT_PORT), |port| port.parse().map_err(|_| format!("reach: {text}: no port")))?;
    let source = match words.next() {
        None => source,
        Some("raw") => Some(Source::Raw),
        Some("masq") => Some(Source::Masq),
        Some(other) => return Err(format!("reach: {text}: {other} is neither raw nor masq")),
    };
    let source = source.ok_or("say `as`: raw or masq")?;
    Ok(End { host: host.name, port, masquerade: source == Source::Masq })
}

/// `address:port[/protocol]`, where the address may be a host's name.
fn destination(text: &str) -> Result<(Vec<SocketAddr>, Protocol), String> {
    let wrong = || format!("to: {text:?} is not like 172.30.0.1:80/udp");
    let (target, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
    let protocol = Protocol::ALL.into_iter().find(|known| known.lower() == protocol).ok_or_else(wrong)?;
    let (address, port) = target.rsplit_once(':').ok_or_else(wrong)?;
    let port: u16 = port.parse().map_err(|_| wrong())?;
    let addresses: Vec<IpAddr> = if let Some(host) = Host::named(address) {
        FAMILIES.iter().map(|family| host.address(*family)).collect()
    } else {
        let address: IpAddr = address.trim_matches(['[', ']']).parse().map_err(|_| wrong())?;
        match address {
            IpAddr::V4(v4) => vec![address, hosts::twin(v4).into()],
            IpAddr::V6(_) => vec![address],
        }
    };
    Ok((addresses.into_iter().map(|address| SocketAddr::new(address, port)).collect(), protocol))
}
