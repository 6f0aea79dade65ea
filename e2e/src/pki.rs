//! Keys, certificates, tokens and kubeconfigs of a test cluster.
//!
//! In: a folder and the names the API server goes by. Out: files in that folder, made once. Components identify
//! themselves with bearer tokens (the API server's `--token-auth-file`); only the API server has a certificate.

use std::fs;
use std::io::Read;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use crate::files::write;
use anyhow::{Context, Result};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose, SanType};

/// An identity that the API server knows: the user name, the group, and the file name of its kubeconfig.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The kubeconfig is `NAME.kubeconfig`.
    pub file: String,
    /// User name.
    pub user: String,
    /// Group, if any.
    pub group: Option<String>,
}

impl Identity {
    /// The cluster's administrator.
    #[must_use]
    pub fn admin() -> Self {
        Self { file: "admin".into(), user: "admin".into(), group: Some("system:masters".into()) }
    }

    /// A component, which Kubernetes knows as `system:NAME`.
    #[must_use]
    pub fn component(name: &str) -> Self {
        Self { file: name.into(), user: format!("system:{name}"), group: None }
    }

    /// A node's kubelet.
    #[must_use]
    pub fn node(name: &str) -> Self {
        let user = format!("system:node:{name}");
        Self { file: format!("kubelet-{name}"), user, group: Some("system:nodes".into()) }
    }
}

/// The folder that holds them all.
#[derive(Debug, Clone)]
pub struct Pki {
    dir: PathBuf,
}

impl Pki {
    /// Opens `dir`, and fills it if this is the first time. `server` is the address in the kubeconfigs,
    /// `addresses` all addresses under which clients reach the API server.
    pub fn ensure(dir: &Path, server: IpAddr, addresses: &[IpAddr], identities: &[Identity]) -> Result<Self> {
        let pki = Self { dir: dir.to_owned() };
        fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
        if !pki.service_account_public_key().exists() {
            pki.create_certificates(addresses).context("creating the API server's certificate")?;
            pki.create_service_account_key()?;
        }
        // Written again on each call: a cluster may have got further nodes.
        pki.write_identities(server, identities)?;
        Ok(pki)
    }

    /// The certificate of the certificate authority.
    #[must_use]
    pub fn ca(&self) -> PathBuf {
        self.dir.join("ca.crt")
    }

    /// The API server's certificate.
    #[must_use]
    pub fn server_certificate(&self) -> PathBuf {
        self.dir.join("apiserver.crt")
    }

    /// The API server's key.
    #[must_use]
    pub fn server_key(&self) -> PathBuf {
        self.dir.join("apiserver.key")
    }

    /// The key that signs the tokens of service accounts.
    #[must_use]
    pub fn service_account_key(&self) -> PathBuf {
        self.dir.join("service-account.key")
    }

    /// The key that verifies them.
    #[must_use]
    pub fn service_account_public_key(&self) -> PathBuf {
        self.dir.join("service-account.pub")
    }

    /// The file of `--token-auth-file`.
    #[must_use]
    pub fn tokens(&self) -> PathBuf {
        self.dir.join("tokens.csv")
    }

    /// The kubeconfig of an identity.
    #[must_use]
    pub fn kubeconfig(&self, identity: &Identity) -> PathBuf {
        self.dir.join(format!("{}.kubeconfig", identity.file))
    }

    fn create_certificates(&self, addresses: &[IpAddr]) -> Result<()> {
        let ca_key = KeyPair::generate()?;
        let mut ca = CertificateParams::default();
        ca.distinguished_name.push(DnType::CommonName, "pointsman test cluster");
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let ca_certificate = ca.self_signed(&ca_key)?;
        let issuer = Issuer::new(ca, ca_key);

        let names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost"];
        let mut server = CertificateParams::new(names.map(str::to_owned))?;
        server.distinguished_name.push(DnType::CommonName, "kube-apiserver");
        server.subject_alt_names.extend(addresses.iter().copied().map(SanType::IpAddress));
        let server_key = KeyPair::generate()?;
        let server_certificate = server.signed_by(&server_key, &issuer)?;
        write(&self.ca(), &ca_certificate.pem())?;
        write(&self.server_certificate(), &server_certificate.pem())?;
        write(&self.server_key(), &server_key.serialize_pem())
    }

    fn create_service_account_key(&self) -> Result<()> {
        let key = KeyPair::generate()?;
        write(&self.service_account_key(), &key.serialize_pem())?;
        // Last: its presence says that all of them are there.
        write(&self.service_account_public_key(), &key.public_key_pem())
    }

    fn write_identities(&self, server: IpAddr, identities: &[Identity]) -> Result<()> {
        use std::fmt::Write;
        let mut tokens = String::new();
        for identity in identities {
            let token = self.token(&identity.file)?;
            let group = identity.group.as_deref().unwrap_or_default();
            let _ = writeln!(tokens, "{token},{user},{user},\"{group}\"", user = identity.user);
            write(&self.kubeconfig(identity), &self.kubeconfig_text(server, &token)?)?;
        }
        write(&self.tokens(), &tokens)
    }

    fn kubeconfig_text(&self, server: IpAddr, token: &str) -> Result<String> {
        let server = std::net::SocketAddr::from((server, crate::control_plane::API_PORT));
        let text = serde_json::json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "default",
            "clusters": [{"name": "default", "cluster": {
                "server": format!("https://{server}"), "certificate-authority": self.ca(),
            }}],
            "users": [{"name": "default", "user": {"token": token}}],
            "contexts": [{"name": "default", "context": {"cluster": "default", "user": "default"}}],
        });
        serde_json::to_string_pretty(&text).context("writing a kubeconfig")
    }

    /// The token of an identity, made when it is first asked for.
    fn token(&self, name: &str) -> Result<String> {
        use std::fmt::Write;
        let path = self.dir.join(format!("{name}.token"));
        if let Ok(token) = fs::read_to_string(&path) {
            return Ok(token);
        }
        let mut bytes = [0; 16];
        fs::File::open("/dev/urandom")
            .and_then(|mut f| f.read_exact(&mut bytes))
            .context("reading randomness")?;
        let token = bytes.iter().fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        });
        write(&path, &token)?;
        Ok(token)
    }
}
