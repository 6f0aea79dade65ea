//! One API server for all tests of a binary, and requests to it under any identity.

use http::Request;
use kube::Client;
use pointsman_crds::custom_resource_definitions;
use pointsman_e2e::api_server::ApiServer;
use pointsman_e2e::control_plane;
use serde_json::{Value, json};
use tokio::sync::OnceCell;

/// The server, with the CustomResourceDefinitions, and a client of the caller's own runtime.
///
/// The server ends with the process.
pub async fn server() -> (&'static ApiServer, Api) {
    static SERVER: OnceCell<ApiServer> = OnceCell::const_new();
    let server = SERVER
        .get_or_init(|| async {
            let server = ApiServer::start().await.expect("an API server");
            let api = Api { client: server.client() };
            for (name, crd) in custom_resource_definitions().unwrap() {
                api.create("apis/apiextensions.k8s.io/v1/customresourcedefinitions", &crd)
                    .await
                    .unwrap_or_else(|error| panic!("{name}: {error}"));
            }
            server
        })
        .await;
    let api = Api { client: control_plane::client(server.kubeconfig()).await.expect("a client") };
    for plural in ["proxyconfigurations", "proxynodestatuses"] {
        api.wait_until_served(&format!("apis/pointsman.dev/v1alpha1/{plural}")).await;
    }
    (server, api)
}

/// Plain requests, because the tests send what no typed client would.
#[derive(Clone)]
pub struct Api {
    pub client: Client,
}

/// Who asks.
#[derive(Clone, Debug, Default)]
pub struct Identity {
    user: String,
    groups: Vec<String>,
    /// The claim of a pod's token.
    node: Option<String>,
}

impl Identity {
    /// A user without groups of its own.
    pub fn user(name: &str) -> Self {
        Self { user: name.to_owned(), ..Self::default() }
    }

    /// A user with all rights that RBAC can give, so that only admission can refuse.
    pub fn cluster_admin(name: &str) -> Self {
        Self { groups: vec!["system:masters".to_owned()], ..Self::user(name) }
    }

    /// The service account of a pod on `node`.
    pub fn pod(namespace: &str, account: &str, node: Option<&str>) -> Self {
        Self {
            user: format!("system:serviceaccount:{namespace}:{account}"),
            groups: vec!["system:serviceaccounts".to_owned(), format!("system:serviceaccounts:{namespace}")],
            node: node.map(str::to_owned),
        }
    }

    /// The same with all rights that RBAC can give.
    pub fn with_all_rights(mut self) -> Self {
        self.groups.push("system:masters".to_owned());
        self
    }
}

/// What a refused person reads.
pub type Answer = Result<Value, String>;

impl Api {
    /// One request; `body` is sent with `content_type`.
    pub async fn send(
        &self,
        identity: Option<&Identity>,
        method: &str,
        path: &str,
        body: Option<(&str, &Value)>,
    ) -> Answer {
        let mut request = Request::builder().method(method).uri(format!("/{path}"));
        if let Some(identity) = identity {
            request = request.header("Impersonate-User", &identity.user);
            for group in &identity.groups {
                request = request.header("Impersonate-Group", group);
            }
            if let Some(node) = &identity.node {
                // Header names are percent-encoded keys.
                request = request.header("Impersonate-Extra-authentication.kubernetes.io%2fnode-name", node);
            }
        }
        let bytes = match body {
            Some((content_type, body)) => {
                request = request.header("Content-Type", content_type);
                serde_json::to_vec(body).unwrap()
            }
            None => Vec::new(),
        };
        match self.client.request::<Value>(request.body(bytes).unwrap()).await {
            Ok(value) => Ok(value),
            Err(kube::Error::Api(status)) => Err(status.message.clone()),
            Err(error) => Err(format!("not an answer of the API: {error}")),
        }
    }

    /// Creates `object`; unknown fields are errors.
    pub async fn create(&self, collection: &str, object: &Value) -> Answer {
        let path = format!("{collection}?fieldValidation=Strict");
        self.send(None, "POST", &path, Some(("application/json", object))).await
    }

    /// What creating `object` would answer.
    pub async fn try_create(&self, collection: &str, object: &Value) -> Answer {
        let path = format!("{collection}?fieldValidation=Strict&dryRun=All");
        self.send(None, "POST", &path, Some(("application/json", object))).await
    }

    /// A JSON merge patch.
    pub async fn merge(&self, path: &str, change: &Value) -> Answer {
        let path = format!("{path}?fieldValidation=Strict");
        self.send(None, "PATCH", &path, Some(("application/merge-patch+json", change))).await
    }

    async fn wait_until_served(&self, path: &str) {
        for _ in 0..200 {
            if self.send(None, "GET", path, None).await.is_ok() {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
        panic!("{path} is not served");
    }
}

/// A node's ProxyNodeStatus.
pub fn node_status(node: &str) -> Value {
    json!({
        "apiVersion": "pointsman.dev/v1alpha1",
        "kind": "ProxyNodeStatus",
        "metadata": {"name": node},
        "spec": {"nodeName": node},
    })
}
