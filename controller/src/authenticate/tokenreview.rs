//! Tokens checked by the Kubernetes API server (TokenReview, audience `diy-service-mesh`).

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use kube::api::{Api, PostParams};
use serde::Deserialize;

use super::{Accepted, AuthError, Caller, PodRef};

/// Asks the API server about tokens.
pub struct TokenReviews {
    api: Api<TokenReview>,
}

impl TokenReviews {
    /// Asks through `client`, whose account may `create` `tokenreviews`.
    pub fn new(client: kube::Client) -> TokenReviews {
        TokenReviews {
            api: Api::all(client),
        }
    }

    /// Whose token it is.
    pub(super) async fn review(&self, token: &str) -> Result<Accepted, AuthError> {
        let spec = TokenReviewSpec {
            audiences: Some(vec![diy_mesh_proto::TOKEN_AUDIENCE.to_owned()]),
            token: Some(token.to_owned()),
        };
        let question = TokenReview {
            spec,
            ..TokenReview::default()
        };
        match self.api.create(&PostParams::default(), &question).await {
            Ok(answer) => verdict(answer.status.unwrap_or_default(), token),
            Err(error) => {
                let reason = explain(&error);
                tracing::warn!("a token could not be checked: {reason}");
                Err(AuthError::Unreachable(reason.into()))
            }
        }
    }
}

/// An API server that knows nothing of audiences leaves them out, and its "authenticated" means
/// less than we ask.
fn verdict(status: TokenReviewStatus, token: &str) -> Result<Accepted, AuthError> {
    if status.authenticated != Some(true) {
        let reason = status.error.filter(|error| !error.is_empty());
        return Err(AuthError::Refused(
            reason
                .unwrap_or_else(|| "the API server does not know it".to_owned())
                .into(),
        ));
    }
    if !status
        .audiences
        .iter()
        .flatten()
        .any(|audience| audience == diy_mesh_proto::TOKEN_AUDIENCE)
    {
        return Err(AuthError::Refused(
            format!("its audience is not {:?}", diy_mesh_proto::TOKEN_AUDIENCE).into(),
        ));
    }
    let user = status.user.unwrap_or_default();
    match user.username.as_deref().filter(|name| !name.is_empty()) {
        Some(name) => {
            let extra = |key| {
                user.extra
                    .as_ref()
                    .and_then(|extra| extra.get(key))
                    .and_then(|values| values.first())
                    .map(String::as_str)
            };
            let caller = Caller {
                user: name.into(),
                pod: PodRef::of(name, extra(POD_NAME), extra(POD_UID)),
            };
            Ok(Accepted {
                caller,
                expires: expiry(token),
            })
        }
        None => Err(AuthError::Refused(
            "the API server names no user for it".into(),
        )),
    }
}

/// Where the API server says what pod a token is bound to.
const POD_NAME: &str = "authentication.kubernetes.io/pod-name";
const POD_UID: &str = "authentication.kubernetes.io/pod-uid";

/// The token's own end. Read without a check, which the API server has made.
fn expiry(token: &str) -> Option<u64> {
    #[derive(Deserialize)]
    struct Claims {
        exp: u64,
    }
    jsonwebtoken::dangerous::insecure_decode_claims::<Claims>(token)
        .ok()
        .map(|claims| claims.exp)
}

fn explain(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) if status.code == 403 => {
            format!(
                "{}; the controller's ServiceAccount needs the verb create on tokenreviews (authentication.k8s.io)",
                status.message
            )
        }
        kube::Error::Api(status) => status.message.clone(),
        other => format!("the Kubernetes API cannot be reached: {other}"),
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::authentication::v1::UserInfo;

    use super::*;

    fn status(authenticated: bool, audiences: &[&str]) -> TokenReviewStatus {
        TokenReviewStatus {
            authenticated: Some(authenticated),
            audiences: Some(
                audiences
                    .iter()
                    .map(|audience| audience.to_string())
                    .collect(),
            ),
            user: Some(UserInfo {
                username: Some("system:serviceaccount:shop:web".into()),
                ..UserInfo::default()
            }),
            error: None,
        }
    }

    #[test]
    fn authenticated_for_our_audience_is_accepted() {
        let accepted = verdict(status(true, &["diy-service-mesh"]), "no JWT").unwrap();
        let caller = Caller {
            user: "system:serviceaccount:shop:web".into(),
            pod: None,
        };
        assert_eq!(
            accepted,
            Accepted {
                caller,
                expires: None
            }
        );
    }

    #[test]
    fn the_pod_of_a_bound_token_is_named() {
        let mut status = status(true, &["diy-service-mesh"]);
        let values = [
            (POD_NAME.to_owned(), vec!["web-1".to_owned()]),
            (POD_UID.to_owned(), vec!["u1".to_owned()]),
        ];
        status.user.as_mut().unwrap().extra = Some(values.into());
        let pod = PodRef {
            namespace: "shop".into(),
            name: "web-1".into(),
            uid: "u1".into(),
        };
        assert_eq!(verdict(status, "t").unwrap().caller.pod, Some(pod));
    }

    #[test]
    fn authenticated_without_our_audience_is_refused() {
        for audiences in [&[][..], &["https://kubernetes.default.svc"][..]] {
            assert!(matches!(
                verdict(status(true, audiences), "t"),
                Err(AuthError::Refused(_))
            ));
        }
        let silent = TokenReviewStatus {
            audiences: None,
            ..status(true, &[])
        };
        assert!(matches!(verdict(silent, "t"), Err(AuthError::Refused(_))));
    }

    #[test]
    fn not_authenticated_is_refused_with_the_servers_reason() {
        let error = TokenReviewStatus {
            error: Some("token is expired".into()),
            ..status(false, &["diy-service-mesh"])
        };
        assert_eq!(
            verdict(error, "t"),
            Err(AuthError::Refused("token is expired".into()))
        );
        assert!(matches!(
            verdict(TokenReviewStatus::default(), "t"),
            Err(AuthError::Refused(_))
        ));
    }

    #[test]
    fn the_end_of_a_token_is_read_from_its_claims() {
        // {"alg":"none"} . {"exp":1700000000}
        assert_eq!(
            expiry("eyJhbGciOiJub25lIn0.eyJleHAiOjE3MDAwMDAwMDB9.x"),
            Some(1_700_000_000)
        );
        assert_eq!(expiry("opaque"), None);
    }
}
