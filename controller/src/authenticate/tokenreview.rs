//! Verification of tokens by the Kubernetes API server (TokenReview, audience `diy-service-mesh`).

use diy_mesh_proto::TOKEN_AUDIENCE;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use kube::api::{Api, PostParams};
use serde::Deserialize;

use super::{Accepted, AuthError, Caller, refused, wrong_audience};
use crate::object::PodRef;

/// The sender of a token. The account of `client` needs the verb `create` on `tokenreviews`.
pub(super) async fn review(client: &kube::Client, token: &str) -> Result<Accepted, AuthError> {
    let review = TokenReview {
        spec: TokenReviewSpec {
            audiences: Some(vec![TOKEN_AUDIENCE.to_owned()]),
            token: Some(token.to_owned()),
        },
        ..TokenReview::default()
    };
    let api: Api<TokenReview> = Api::all(client.clone());
    match api.create(&PostParams::default(), &review).await {
        Ok(review) => result(review.status.unwrap_or_default(), token),
        Err(error) => {
            let reason = explain(&error, "tokenreviews (authentication.k8s.io)");
            tracing::warn!("cannot verify a token: {reason}");
            Err(AuthError::Unreachable(reason.into()))
        }
    }
}

/// An API server without support for audiences returns none, and does not check them.
fn result(status: TokenReviewStatus, token: &str) -> Result<Accepted, AuthError> {
    if status.authenticated != Some(true) {
        let reason = status.error.filter(|error| !error.is_empty());
        return Err(refused(
            reason.as_deref().unwrap_or("the API server rejects it"),
        ));
    }
    let mut audiences = status.audiences.iter().flatten();
    if !audiences.any(|audience| audience == TOKEN_AUDIENCE) {
        return Err(refused(&wrong_audience()));
    }
    let user = status.user.unwrap_or_default();
    let Some(name) = user.username.as_deref().filter(|name| !name.is_empty()) else {
        return Err(refused("the API server returned no user name"));
    };
    let extra = |key| {
        let values = user.extra.as_ref()?.get(key)?;
        values.first().map(String::as_str)
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

/// The pod that a token is bound to.
const POD_NAME: &str = "authentication.kubernetes.io/pod-name";
const POD_UID: &str = "authentication.kubernetes.io/pod-uid";

/// The expiry of a token, which the API server has verified.
fn expiry(token: &str) -> Option<u64> {
    #[derive(Deserialize)]
    struct Claims {
        exp: u64,
    }
    diy_mesh_jwt::unverified_claims(token).map(|claims: Claims| claims.exp)
}

/// Describes an error. `resource` is what the account of this controller needs to create.
pub(super) fn explain(error: &kube::Error, resource: &str) -> String {
    match error {
        kube::Error::Api(status) if status.code == 403 => {
            format!(
                "{}; the controller's ServiceAccount needs the verb create on {resource}",
                status.message
            )
        }
        kube::Error::Api(status) => status.message.clone(),
        other => format!("cannot reach the Kubernetes API: {other}"),
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
    fn accepts_token_with_the_audience() {
        let accepted = result(status(true, &["diy-service-mesh"]), "no JWT").unwrap();
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
    fn returns_the_pod_of_a_bound_token() {
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
        assert_eq!(result(status, "t").unwrap().caller.pod, Some(pod));
    }

    #[test]
    fn rejects_token_without_the_audience() {
        for audiences in [&[][..], &["https://kubernetes.default.svc"][..]] {
            assert!(matches!(
                result(status(true, audiences), "t"),
                Err(AuthError::Refused(_))
            ));
        }
        let silent = TokenReviewStatus {
            audiences: None,
            ..status(true, &[])
        };
        assert!(matches!(result(silent, "t"), Err(AuthError::Refused(_))));
    }

    #[test]
    fn rejects_token_with_the_reason_of_the_server() {
        let error = TokenReviewStatus {
            error: Some("token is expired".into()),
            ..status(false, &["diy-service-mesh"])
        };
        assert_eq!(
            result(error, "t"),
            Err(AuthError::Refused("token is expired".into()))
        );
        assert!(matches!(
            result(TokenReviewStatus::default(), "t"),
            Err(AuthError::Refused(_))
        ));
    }

    #[test]
    fn reads_expiry_from_the_claims() {
        // {"alg":"none"} . {"exp":1700000000}
        assert_eq!(
            expiry("eyJhbGciOiJub25lIn0.eyJleHAiOjE3MDAwMDAwMDB9.x"),
            Some(1_700_000_000)
        );
        assert_eq!(expiry("opaque"), None);
    }
}
