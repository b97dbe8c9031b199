//! Checks of the webhook configuration, its CA bundle, and the injection. Pure.

use diy_mesh_model::json;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhook;

use super::{
    Finding, Findings, certificates, count,
    facts::{DryRun, Facts, WEBHOOK},
    or_ok,
};
use crate::time::format_duration;
use diy_mesh_sandbox::manifest;

const CA_BUNDLE_ADVICE: &str = "the injector repairs it within a minute; otherwise see its log";

/// The webhook configuration exists and matches the embedded manifests.
pub(super) fn configuration(facts: &Facts) -> Findings<'_> {
    let Some(configuration) = facts.webhook.as_ref()? else {
        let text =
            format!("MutatingWebhookConfiguration {WEBHOOK} not found: new pods receive no proxy");
        return Ok(vec![Finding::problem(
            text,
            "mesh install | kubectl apply -f -",
        )]);
    };
    let webhooks = configuration.webhooks.as_deref().unwrap_or_default();
    let expected = expected();
    let mut differences = Vec::new();
    for entry in &expected {
        match webhooks.iter().find(|webhook| webhook.name == entry.name) {
            None => differences.push(format!("{} is missing", entry.name)),
            Some(webhook)
                if significant_fields(webhook, &facts.namespace)
                    != significant_fields(entry, &facts.namespace) =>
            {
                differences.push(format!(
                    "{} differs in match conditions, path, namespace selector or failure policy",
                    entry.name
                ));
            }
            Some(_) => {}
        }
    }
    let text = format!(
        "{WEBHOOK} differs from the manifests of this version: injection can differ from the documentation"
    );
    let advice = "apply the manifests of the running version: mesh install | kubectl apply -f -";
    let differs = Finding::warning(text, advice).if_any(differences);
    let entries = count(webhooks.len(), "entry", "entries");
    Ok(or_ok([differs], format!("{entries} in {WEBHOOK}")))
}

/// The webhooks of the embedded manifests.
fn expected() -> Vec<MutatingWebhook> {
    let objects = manifest::embedded().objects().unwrap_or_default();
    let configuration = objects
        .into_iter()
        .find(|object| object["kind"] == "MutatingWebhookConfiguration");
    configuration
        .and_then(|configuration| json::read(&configuration["webhooks"]).ok())
        .unwrap_or_default()
}

/// The fields of a webhook without those that the API server or the injector sets.
fn significant_fields(webhook: &MutatingWebhook, namespace: &str) -> String {
    let service = webhook.client_config.service.as_ref();
    let conditions = webhook
        .match_conditions
        .iter()
        .flatten()
        .map(|condition| condition.expression.split_whitespace().collect::<String>());
    let selector = webhook
        .namespace_selector
        .iter()
        .flat_map(|selector| selector.match_expressions.iter().flatten());
    // The webhook excludes the namespace of the mesh, whatever its name.
    let selector = selector.map(|expression| {
        format!("{expression:?}").replace("\"service-mesh\"", &format!("{namespace:?}"))
    });
    let path = service.and_then(|service| service.path.clone());
    let failure = webhook.failure_policy.clone();
    let parts = [path.unwrap_or_default(), failure.unwrap_or("Fail".into())].into_iter();
    let parts: Vec<String> = parts.chain(conditions).chain(selector).collect();
    parts.join("\n")
}

/// The API server can verify the serving certificate of the injector.
pub(super) fn ca_bundle(facts: &Facts) -> Findings<'_> {
    let Ok(Some(configuration)) = &facts.webhook else {
        return Ok(Vec::new());
    };
    let bundle = |webhook: &MutatingWebhook| {
        let bundle = webhook.client_config.ca_bundle.clone();
        bundle.unwrap_or_default().0
    };
    let webhooks = configuration.webhooks.as_deref().unwrap_or_default();
    let invalid = |is_invalid: &dyn Fn(&[u8]) -> bool| -> Vec<String> {
        webhooks
            .iter()
            .filter(|webhook| is_invalid(&bundle(webhook)))
            .map(|webhook| webhook.name.clone())
            .collect()
    };
    let empty = invalid(&|bundle| certificates::read(bundle).is_empty());
    if !empty.is_empty() {
        let text = "caBundle contains no certificate: the API server cannot verify the injector";
        let finding = Finding::problem(text, CA_BUNDLE_ADVICE);
        return Ok(vec![finding.with_details(empty)]);
    }
    let Some(serving) = facts.serving.as_ref()? else {
        let text = format!(
            "Secret {}/diy-service-mesh-injector-tls with the serving certificate of the injector not found",
            facts.namespace
        );
        let advice = "the injector creates it at startup: see its log";
        return Ok(vec![Finding::problem(text, advice)]);
    };
    let serving = serving.as_bytes();
    let mismatched = invalid(&|bundle| !certificates::signed_by(serving, bundle));
    if !mismatched.is_empty() {
        let text = "caBundle does not match the serving certificate of the injector: pods that request injection cannot be created";
        let finding = Finding::problem(text, CA_BUNDLE_ADVICE);
        return Ok(vec![finding.with_details(mismatched)]);
    }
    let validity = certificates::validity(serving);
    let lifetime_and_remaining = validity.map(|(not_before, not_after)| {
        [not_before, facts.now].map(|time| not_after.saturating_sub(time))
    });
    Ok(vec![match lifetime_and_remaining {
        Some([_, 0]) => Finding::problem(
            "the serving certificate of the injector has expired",
            "the injector renews it while it runs: see its log",
        ),
        Some([lifetime, remaining]) if remaining < lifetime / 5 => {
            let text = format!(
                "the serving certificate of the injector expires in {} and its renewal is overdue",
                format_duration(remaining)
            );
            Finding::warning(text, "see the log of the injector")
        }
        Some([_, remaining]) => Finding::ok(format!(
            "matches the serving certificate of the injector, which expires in {}",
            format_duration(remaining)
        )),
        None => Finding::problem(
            "the serving certificate of the injector cannot be parsed",
            "delete Secret diy-service-mesh-injector-tls: the injector creates it again",
        ),
    }])
}

/// A pod that requests injection receives a proxy in a dry run.
pub(super) fn injection(facts: &Facts) -> Findings<'_> {
    Ok(vec![match facts.dry_run.as_ref()? {
        DryRun::Injected => Finding::ok("a pod that requests injection receives a proxy (dry run)"),
        DryRun::NotInjected => Finding::problem(
            "a pod that requests injection receives no proxy (dry run)",
            "see the webhook check; restore the webhook with mesh install | kubectl apply -f -",
        ),
        DryRun::Failed(message) => {
            let text = "the API server failed to call the injector, so pods that request injection cannot be created";
            let advice = if message.contains("x509") {
                format!(
                    "the API server does not trust the serving certificate of the injector: see the caBundle check; {CA_BUNDLE_ADVICE}"
                )
            } else {
                let namespace = &facts.namespace;
                format!(
                    "check that an injector is ready (kubectl get pods -n {namespace}) and that the API server can reach it"
                )
            };
            Finding::problem(format!("{text}: {message}"), advice)
        }
    }])
}

#[cfg(test)]
mod tests {
    use diy_mesh_testkit::authority::server;
    use k8s_openapi::{ByteString, api::admissionregistration::v1::MutatingWebhookConfiguration};

    use super::super::{Level, facts::testing::unknown_facts};
    use super::*;

    fn facts(bundle: Option<&str>, serving: &str) -> Facts {
        let mut webhooks = expected();
        for webhook in &mut webhooks {
            webhook.client_config.ca_bundle =
                bundle.map(|bundle| ByteString(bundle.as_bytes().to_vec()));
        }
        let configuration = MutatingWebhookConfiguration {
            webhooks: Some(webhooks),
            ..Default::default()
        };
        Facts {
            webhook: Ok(Some(configuration)),
            serving: Ok(Some(serving.into())),
            ..unknown_facts()
        }
    }

    #[test]
    fn requires_a_ca_bundle_that_verifies_the_serving_certificate() {
        let (of_injector, other) = (server("injector"), server("injector").root);
        let (ca, leaf) = (of_injector.root, of_injector.leaf);
        let level = |bundle: Option<&str>| ca_bundle(&facts(bundle, &leaf)).unwrap()[0].level;
        assert_eq!(level(Some(&ca)), Level::Ok);
        assert_eq!(level(Some(&format!("{other}{ca}"))), Level::Ok);
        assert_eq!(
            (level(Some(&other)), level(Some("x")), level(None)),
            (Level::Problem, Level::Problem, Level::Problem)
        );
        let finding = &ca_bundle(&facts(Some(&other), &leaf)).unwrap()[0];
        assert!(
            finding.text.contains("does not match") && finding.details.len() == expected().len(),
            "{finding:?}"
        );
    }

    #[test]
    fn reports_differences_from_the_embedded_webhooks() {
        let mut facts = facts(None, "");
        assert_eq!(configuration(&facts).unwrap()[0].level, Level::Ok);
        let webhooks = facts
            .webhook
            .as_mut()
            .unwrap()
            .as_mut()
            .unwrap()
            .webhooks
            .as_mut()
            .unwrap();
        webhooks.remove(0);
        webhooks[0].failure_policy = Some("Ignore".into());
        assert_eq!(configuration(&facts).unwrap()[0].details.len(), 2);
        assert_eq!(
            configuration(&Facts {
                webhook: Ok(None),
                ..unknown_facts()
            })
            .unwrap()[0]
                .level,
            Level::Problem
        );
    }

    #[test]
    fn reports_the_cause_of_a_failed_dry_run() {
        assert_eq!(injection_finding(DryRun::Injected).level, Level::Ok);
        assert_eq!(injection_finding(DryRun::NotInjected).level, Level::Problem);
        let finding = injection_finding(DryRun::Failed(
            "failed calling webhook: x509: certificate signed by unknown authority".into(),
        ));
        assert!(finding.advice.contains("caBundle"), "{finding:?}");
    }

    fn injection_finding(dry_run: DryRun) -> Finding {
        injection(&Facts {
            dry_run: Ok(dry_run),
            ..unknown_facts()
        })
        .unwrap()
        .remove(0)
    }
}
