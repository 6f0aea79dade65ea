//! What can go wrong between the operator and the API server, told so that the reader knows what to do next.

use kube::core::Status;
use thiserror::Error;

/// A request that the API server did not carry out.
#[derive(Debug, Error)]
pub enum ApiError {
    /// RBAC or an admission policy said no.
    #[error(
        "the operator is not allowed to {verb} {resource}: its role needs verb {verb} on {resource}; 'helm upgrade' of \
         the pointsman chart restores the roles. The server says: {message}"
    )]
    Forbidden {
        /// What was tried.
        verb: &'static str,
        /// On what.
        resource: &'static str,
        /// The server's words.
        message: String,
    },
    /// Anything else.
    #[error("cannot {verb} {resource} {name}: {error}; the operator tries again")]
    Failed {
        /// What was tried.
        verb: &'static str,
        /// On what.
        resource: &'static str,
        /// The object's name.
        name: String,
        /// Why it failed.
        error: String,
    },
    /// Another replica may lead by now.
    #[error("the lease is no longer held; nothing is written")]
    NotLeader,
}

impl ApiError {
    /// What `error` means for `verb` on `resource` `name`.
    #[must_use]
    pub fn new(verb: &'static str, resource: &'static str, name: &str, error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) if status.is_forbidden() => {
                Self::Forbidden { verb, resource, message: status.message }
            }
            error => Self::Failed { verb, resource, name: name.to_owned(), error: text(error) },
        }
    }
}

/// kube prints the whole Status of an error twice; its message suffices.
fn text(error: kube::Error) -> String {
    match error {
        kube::Error::Api(status) => {
            let Status { message, reason, code, .. } = *status;
            format!("{message} ({code} {reason})")
        }
        error => error.to_string(),
    }
}
