use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::Mode;

use super::*;
use crate::admin;
use crate::config::tests::sample;
use crate::state::{Compatibility, FamilyState};

struct Rig {
    view: View,
    state: watch::Sender<SyncState>,
    node: watch::Sender<NodeEligibility>,
    listeners: watch::Sender<Listeners>,
    _watches: watch::Sender<Watches>,
}

fn rig() -> Rig {
    let (state, of_state) = watch::channel(SyncState::new(Timestamp::UNIX_EPOCH));
    let (watches, of_watches) = watch::channel(Watches::default());
    let eligible = NodeEligibility { exists: true, ..NodeEligibility::default() };
    let (node, of_node) = watch::channel(eligible);
    let (listeners, of_listeners) = watch::channel(Listeners::new());
    let view = View {
        state: of_state,
        watches: of_watches,
        node: of_node,
        identity: Arc::default(),
        pulse: Arc::default(),
        metrics: Arc::default(),
        listeners: of_listeners,
        checks: Checks::default(),
    };
    Rig { view, state, node, listeners, _watches: watches }
}

impl Rig {
    fn make_ready(&self) {
        self.state.send_modify(|state| {
            state.waiting.clear();
            state.config.assigned = Some("default-1".to_owned());
            state.config.active = Some("default-1".to_owned());
            state.config.in_force = Some(Arc::new(sample()));
            state.mode = Some(Mode::Iptables);
            state.compatibility = Compatibility::Supported;
            let family = FamilyState { last_updated: Some(Timestamp::UNIX_EPOCH), ..FamilyState::default() };
            state.families.insert(IpFamily::IPv4, family);
            state.verified = true;
        });
    }

    fn ports(&self, port: u16) {
        self.state.send_modify(|state| {
            let mut config = sample();
            config.healthz_port = port;
            state.config.in_force = Some(Arc::new(config));
        });
    }

    fn listener(&self) -> Listener {
        Listener {
            name: "healthz",
            address: health_address,
            routes: self.view.health_routes(),
            state: self.state.subscribe(),
            report: self.listeners.clone(),
            metrics: Arc::clone(&self.view.metrics),
        }
    }
}

async fn get(port: u16, path: &str) -> Option<String> {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.ok()?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).await.ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.ok()?;
    Some(answer)
}

/// A port that nobody listens on right now.
async fn free_port() -> u16 {
    TcpListener::bind("[::]:0").await.unwrap().local_addr().unwrap().port()
}

async fn eventually<T, F: Future<Output = Option<T>>>(mut ask: impl FnMut() -> F) -> T {
    for _ in 0..200 {
        if let Some(answer) = ask().await {
            return answer;
        }
        sleep(Duration::from_millis(50)).await;
    }
    panic!("it never came");
}

// ids: HZ-2 HZ-3 HZ-4
#[tokio::test]
async fn hz_2_3_4_healthz_speaks_of_the_node_and_livez_does_not() {
    let rig = rig();
    rig.make_ready();
    let healthz = rig.view.healthz();
    assert_eq!(healthz.status(), 200);
    assert_eq!(healthz.headers()["content-type"], "application/json");
    assert!(healthz.body().contains("\"nodeEligible\":true"), "{}", healthz.body());
    let sound = *rig.node.borrow();
    for node in [
        NodeEligibility { to_be_deleted: true, ..sound },
        NodeEligibility { deleting: true, ..sound },
        NodeEligibility::default(),
    ] {
        rig.node.send_replace(node);
        let healthz = rig.view.healthz();
        assert_eq!(healthz.status(), 503, "{node:?}");
        assert!(healthz.body().contains("\"nodeEligible\":false"), "{}", healthz.body());
        assert!(healthz.body().contains("\"healthy\":true"), "the proxy itself is: {}", healthz.body());
        assert!(
            healthz.body().contains("\"lastUpdated\":\"") && healthz.body().contains("\"currentTime\":\"")
        );
    }
    let livez = rig.view.livez();
    assert_eq!(livez.status(), 200);
    assert!(!livez.body().contains("nodeEligible"), "{}", livez.body());
    let metrics = rig.view.metrics().into_body();
    for line in [
        "kubeproxy_proxy_healthz_total{code=\"200\"} 1",
        "kubeproxy_proxy_healthz_total{code=\"503\"} 3",
        "kubeproxy_proxy_livez_total{code=\"200\"} 1",
        "pointsman_ready 1",
    ] {
        assert!(metrics.contains(line), "HZ-4: {line}");
    }
}

#[tokio::test]
async fn readyz_says_why_not() {
    let rig = rig();
    let answer = rig.view.readyz();
    assert_eq!(answer.status(), 503);
    assert!(answer.body().contains("ConfigNotApplied"), "{}", answer.body());
    rig.make_ready();
    assert_eq!(rig.view.readyz().status(), 200);
}

// ids: HZ-5 CFG-14
#[tokio::test]
async fn hz_5_the_metrics_port_has_every_page_of_kube_proxys() {
    let mut rig = rig();
    let identity = Identity {
        version: "1.2.3".to_owned(),
        flags: BTreeMap::from([("node-name", "n1".to_owned())]),
        ..Identity::default()
    };
    rig.view.identity = Arc::new(identity);
    assert_eq!(rig.view.proxy_mode().status(), 503);
    assert_eq!(rig.view.configz().status(), 503);
    rig.make_ready();
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = socket.local_addr().unwrap().port();
    tokio::spawn(serve(socket, rig.view.metrics_routes(), std::future::pending()));
    for (path, expected) in [
        ("/proxyMode", "\r\n\r\niptables"),
        ("/healthz", "\r\n\r\nok"),
        ("/configz", "{\"agent.pointsman.dev\":{"),
        ("/configz", "\"healthzPort\":10256"),
        ("/statusz", "Binary version: 1.2.3\n"),
        ("/statusz", "Started: 1970-01-01T00:00:00Z\nUp: "),
        ("/flagz", "\nnode-name=n1\n"),
        ("/metrics", "\npointsman_ready 1\n"),
        ("/metrics/slis", "\nkubernetes_healthcheck{name=\"proxy\",type=\"readyz\"} 1\n"),
    ] {
        let answer = get(port, path).await.unwrap();
        assert!(answer.starts_with("HTTP/1.0 200 OK") && answer.contains(expected), "{path}: {answer}");
    }
    let answer = get(port, "/debug/pprof").await.unwrap();
    assert!(answer.starts_with("HTTP/1.0 404") && answer.contains("/metrics/slis"), "{answer}");
}

#[tokio::test]
async fn a_listener_follows_the_configuration() {
    let rig = rig();
    rig.make_ready();
    let (first, second) = (free_port().await, free_port().await);
    rig.ports(first);
    let task = tokio::spawn(rig.listener().run());
    let answer = eventually(|| get(first, "/healthz")).await;
    assert!(answer.contains("200 OK"), "{answer}");
    assert!(get(first, "/nonsense").await.unwrap().contains("404"));
    rig.ports(second);
    eventually(|| get(second, "/livez")).await;
    assert!(get(first, "/healthz").await.is_none(), "the old port is closed");
    rig.ports(0);
    eventually(|| async { get(second, "/livez").await.is_none().then_some(()) }).await;
    drop(rig);
    task.await.unwrap();
}

#[tokio::test]
async fn a_port_in_use_is_reported_and_does_not_stop_the_agent() {
    let rig = rig();
    let taken = TcpListener::bind("[::]:0").await.unwrap();
    let port = taken.local_addr().unwrap().port();
    rig.ports(port);
    tokio::spawn(rig.listener().run());
    let mut listeners = rig.listeners.subscribe();
    let problem = listeners
        .wait_for(|all| all.get("healthz").is_some_and(Option::is_some))
        .await
        .unwrap()
        .get("healthz")
        .cloned()
        .flatten()
        .unwrap();
    assert!(problem.contains("cannot be listened on"), "{problem}");
    // Another port is taken at once, without waiting for the retry.
    let other = free_port().await;
    rig.ports(other);
    eventually(|| get(other, "/healthz")).await;
    assert_eq!(rig.listeners.borrow().get("healthz"), Some(&None));
}

#[tokio::test]
async fn the_admin_socket_answers_probes_and_belongs_to_its_owner() {
    use std::os::unix::fs::PermissionsExt;
    let rig = rig();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let error = admin::probe(&path, "live").await.unwrap_err().to_string();
    assert!(error.contains("pointsman-agent run"), "{error}");
    // Also over the socket that a killed agent has left.
    for _ in 0..2 {
        let view = rig.view.clone();
        let at = path.clone();
        let server = tokio::spawn(async move { admin::serve(&at, &view).await });
        eventually(|| async { admin::probe(&path, "live").await.ok() }).await;
        let mode = std::fs::metadata(path.join("admin.sock")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let error = admin::probe(&path, "ready").await.unwrap_err().to_string();
        assert!(error.contains("ConfigNotApplied"), "{error}");
        server.abort();
    }
    let view = rig.view.clone();
    let at = path.clone();
    tokio::spawn(async move { admin::serve(&at, &view).await });
    rig.make_ready();
    eventually(|| async { admin::probe(&path, "ready").await.ok() }).await;
    let state: serde_json::Value =
        serde_json::from_str(&admin::probe(&path, "state").await.unwrap()).unwrap();
    assert_eq!(state["ready"], true);
    assert_eq!(state["config"]["active"], "default-1");
}

#[tokio::test]
async fn a_client_that_takes_every_place_of_a_port_holds_up_others_only_while_it_does() {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = socket.local_addr().unwrap().port();
    let routes = warp::any().map(|| reply(200, TEXT, "here".to_owned())).boxed();
    let server = tokio::spawn(serve(socket, routes, std::future::pending()));
    let mut idle = Vec::new();
    for _ in 0..serve::CONNECTIONS {
        idle.push(tokio::net::TcpStream::connect(("127.0.0.1", port)).await.unwrap());
    }
    let late = tokio::time::timeout(Duration::from_millis(300), get(port, "/")).await;
    assert!(late.is_err(), "no more than so many connections are held");
    idle.truncate(1);
    assert!(get(port, "/").await.unwrap().ends_with("here"));
    server.abort();
}
