//! Tokens of requests through two proxies, with keys of a Secret that the controller fetches.

use anyhow::{Result, ensure};
use diy_mesh_testkit::tokens::{Signer, now};
use diy_mesh_tests::cluster::workloads::{App, Responses};
use diy_mesh_tests::cluster::{MANIFESTS, Namespace, gateway_api, in_namespace, kubectl, wait_for};
use serde_json::{Value, json};

const ISSUER: &str = "https://id.example.com";
/// The time until a token expires, in seconds.
const LIFE: u64 = 3600;

/// The public keys, as a Secret.
fn secret(signer: &Signer) -> String {
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "idp"},
        "stringData": {"jwks": signer.jwks()}});
    secret.to_string()
}

/// The value of Authorization for a user of this group.
fn bearer(signer: &Signer, group: &str) -> String {
    let claims = json!({"iss": ISSUER, "aud": "shop", "sub": "ada", "groups": [group],
        "exp": now() + LIFE});
    format!("Bearer {}", signer.sign(&claims))
}

/// The result of the requests of the last seconds: they agree.
fn met(namespace: &Namespace, client: &str) -> Result<&'static str> {
    let app = format!("app={client}");
    let logs = [
        "logs",
        "-l",
        &app,
        "-c",
        "http-client",
        "--since=3s",
        "--tail=-1",
    ];
    let responses = Responses::count(&namespace.kubectl(&logs)?);
    let all = |part: &str| {
        responses
            .bad
            .iter()
            .all(|line| line.to_lowercase().contains(part))
    };
    match responses.good {
        0 if responses.bad.is_empty() => {}
        0 if all("x-mesh-error: denied") => return Ok("denied"),
        0 if all("x-mesh-error: invalid-token") => return Ok("invalid"),
        // The sample server does not know other paths.
        0 if all("http/1.1 404") => return Ok("allowed"),
        _ if responses.bad.is_empty() => return Ok("allowed"),
        _ => {}
    }
    anyhow::bail!("{client}: {responses:?}")
}

fn expect(namespace: &Namespace, expected: &[(&str, &str)]) -> Result<()> {
    wait_for("the verdicts", || {
        for (client, expected) in expected {
            let met = met(namespace, client)?;
            ensure!(met == *expected, "{client}: {met}, expected {expected}");
        }
        Ok(Some(()))
    })
}

#[test]
fn tokens_decide_with_the_keys_that_their_secret_has() -> Result<()> {
    in_namespace("tokens", |namespace| {
        kubectl(&["apply", "-k", &format!("{MANIFESTS}/crds")])?;
        gateway_api::install()?;
        let (signer, other) = (Signer::new(), Signer::new());
        namespace.apply(&App::http_server().deployment())?;
        namespace.apply(&App::http_server().service())?;
        namespace.apply(&secret(&signer))?;
        namespace.apply(&routes(&[
            ("/hello", &bearer(&signer, "ops")),
            ("/group", &bearer(&signer, "dev")),
            ("/forged", &bearer(&other, "ops")),
        ]))?;
        namespace.rolled_out("server")?;
        for (name, endpoint) in [
            ("client", "http://server/hello"),
            ("group", "http://server/group"),
            ("forged", "http://server/forged"),
            ("none", "http://server/none"),
        ] {
            let client = App {
                name,
                endpoint,
                ..App::http_client()
            };
            namespace.apply(&client.deployment())?;
        }
        for name in ["client", "group", "forged", "none"] {
            namespace.rolled_out(name)?;
        }
        namespace.apply(&policy().to_string())?;
        // Without the permission, no key is known, and no token valid.
        let unresolved = resolved(namespace, "False")?;
        ensure!(unresolved["reason"] == "KeysNotFound", "{unresolved:#}");
        let message = unresolved["message"].as_str().unwrap_or_default();
        ensure!(message.contains("Secret idp/jwks"), "{message}");
        let invalid = ["client", "group", "forged"].map(|name| (name, "invalid"));
        expect(namespace, &[&invalid[..], &[("none", "denied")]].concat())?;
        permit(namespace)?;
        let verdicts = [
            ("client", "allowed"),
            ("group", "denied"),
            ("forged", "invalid"),
            ("none", "denied"),
        ];
        resolved(namespace, "True")?;
        expect(namespace, &verdicts)?;
        let logs = [
            "logs",
            "-l",
            "app=server",
            "-c",
            "http-server",
            "--since=3s",
            "--tail=-1",
        ];
        let received = namespace.kubectl(&logs)?;
        let is_named = received.to_lowercase().contains("x-user: ada");
        ensure!(is_named, "no X-User in {received}");
        // Another key signs.
        namespace.apply(&secret(&other))?;
        expect(namespace, &[("forged", "allowed"), ("client", "invalid")])?;
        // Good keys outlive their source.
        namespace.kubectl(&["delete", "secret", "idp"])?;
        wait_for("the message in the status", || {
            let status = status(namespace)?;
            let issuer = &status["issuers"][0];
            let message = issuer["message"].as_str().unwrap_or_default();
            let is_kept = message.contains("not found") && issuer["keys"].is_string();
            ensure!(is_kept, "{status:#}");
            Ok(Some(()))
        })?;
        expect(namespace, &[("forged", "allowed"), ("none", "denied")])
    })
}

/// Sets the field Authorization of requests by their path, at the proxy of the client.
fn routes(tokens: &[(&str, &str)]) -> String {
    let rules = tokens.iter().map(|(path, token)| {
        let set = json!([{"name": "Authorization", "value": token}]);
        json!({
            "matches": [{"path": {"type": "Exact", "value": path}}],
            "filters": [{"type": "RequestHeaderModifier", "requestHeaderModifier": {"set": set}}],
            "backendRefs": [{"name": "server", "port": 80}],
        })
    });
    let plain = json!({"backendRefs": [{"name": "server", "port": 80}]});
    let rules: Vec<Value> = rules.chain([plain]).collect();
    let parents = json!([{"group": "", "kind": "Service", "name": "server"}]);
    let route = json!({"apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute",
        "metadata": {"name": "tokens"}, "spec": {"parentRefs": parents, "rules": rules}});
    route.to_string()
}

fn policy() -> Value {
    let keys = json!({"type": "Secret", "secret": {"name": "idp", "key": "jwks"}});
    let claims = json!([{"claim": "groups", "type": "Exact", "value": "ops"}]);
    json!({
        "apiVersion": "diy-service-mesh.dev/v1alpha1", "kind": "AuthorizationPolicy",
        "metadata": {"name": "tokens"},
        "spec": {
            "targetRefs": [{"group": "", "kind": "Service", "name": "server"}],
            "action": "ALLOW",
            "issuers": [{"issuer": ISSUER, "audiences": ["shop"], "keys": keys,
                "headers": [{"claim": "sub", "name": "X-User"}]}],
            "rules": [{"requests": [{"claims": claims}]}],
        },
    })
}

/// Lets the controller read the Secret.
fn permit(namespace: &Namespace) -> Result<()> {
    let role = ["create", "role", "keys", "--verb=get", "--resource=secrets"];
    namespace.kubectl(&[&role[..], &["--resource-name=idp"]].concat())?;
    let account = "--serviceaccount=service-mesh:controller";
    let binding = ["create", "rolebinding", "keys", "--role=keys", account];
    namespace.kubectl(&binding).map(drop)
}

fn status(namespace: &Namespace) -> Result<Value> {
    let json = namespace.kubectl(&["get", "authorizationpolicy", "tokens", "-o", "json"])?;
    let policy: Value = serde_json::from_str(&json)?;
    Ok(policy["status"].clone())
}

/// Waits for the condition about the keys.
fn resolved(namespace: &Namespace, expected: &str) -> Result<Value> {
    wait_for("the condition about the keys", || {
        let status = status(namespace)?;
        let conditions = status["ancestors"][0]["conditions"].as_array();
        let mut conditions = conditions.into_iter().flatten();
        let condition = conditions.find(|one| one["type"] == "ResolvedRefs");
        let condition = condition.filter(|one| one["status"] == *expected);
        ensure!(condition.is_some(), "{status:#}");
        Ok(condition.cloned())
    })
}
