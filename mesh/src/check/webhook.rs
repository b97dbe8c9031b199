//! The way new pods come into the mesh: the webhook's configuration, its certificate, and a trial of the whole. Pure.

use k8s_openapi::api::admissionregistration::v1::MutatingWebhook;

use super::{
    Finding, certificates, count,
    facts::{Facts, Trial, WEBHOOK},
};
use crate::{sandbox::manifest, time::span};

const REPAIRS: &str = "the injector puts it right within a minute; if not, its log says why";

/// It is there, with every entry that this version has.
pub(super) fn configuration(facts: &Facts) -> Vec<Finding> {
    const CHECK: &str = "webhook";
    let webhooks = match &facts.webhook {
        Err(why) => return vec![Finding::unknown(CHECK, why)],
        Ok(None) => {
            let text = format!(
                "MutatingWebhookConfiguration {WEBHOOK} is not there: no new pod gets a proxy"
            );
            return vec![Finding::problem(CHECK, text, "kubectl apply -k manifests")];
        }
        Ok(Some(configuration)) => configuration.webhooks.as_deref().unwrap_or_default(),
    };
    let expected = expected();
    let mut differences = Vec::new();
    for entry in &expected {
        match webhooks.iter().find(|webhook| webhook.name == entry.name) {
            None => differences.push(format!("{} is missing", entry.name)),
            Some(webhook)
                if essence(webhook, &facts.namespace) != essence(entry, &facts.namespace) =>
            {
                differences.push(format!(
                    "{} has other conditions, another path or another failure policy",
                    entry.name
                ));
            }
            Some(_) => {}
        }
    }
    vec![if differences.is_empty() {
        Finding::ok(
            CHECK,
            format!("{} in {WEBHOOK}", count(webhooks.len(), "entry", "entries")),
        )
    } else {
        let text = "it is not the one of this version: pods may come into the mesh otherwise than the documentation says";
        Finding::warning(
            CHECK,
            text,
            "kubectl apply -k manifests, of the version that runs",
        )
        .naming(differences)
    }]
}

/// The entries of the manifests that this program carries.
fn expected() -> Vec<MutatingWebhook> {
    let objects = manifest::embedded().objects().unwrap_or_default();
    let configuration = objects
        .into_iter()
        .find(|object| object["kind"] == "MutatingWebhookConfiguration");
    configuration
        .and_then(|configuration| serde_json::from_value(configuration["webhooks"].clone()).ok())
        .unwrap_or_default()
}

/// What an entry does, without what the API server or the injector fills in.
fn essence(webhook: &MutatingWebhook, namespace: &str) -> String {
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
    // Where the mesh lives elsewhere, it is that namespace which is left alone.
    let selector = selector.map(|expression| {
        format!("{expression:?}").replace("\"service-mesh\"", &format!("{namespace:?}"))
    });
    let parts = [
        service
            .and_then(|service| service.path.clone())
            .unwrap_or_default(),
        webhook
            .failure_policy
            .clone()
            .unwrap_or_else(|| "Fail".into()),
    ];
    parts
        .into_iter()
        .chain(conditions)
        .chain(selector)
        .collect::<Vec<_>>()
        .join("\n")
}

/// The API server can verify the injector.
pub(super) fn ca_bundle(facts: &Facts) -> Vec<Finding> {
    const CHECK: &str = "caBundle";
    let Ok(Some(configuration)) = &facts.webhook else {
        return Vec::new();
    };
    let bundle = |webhook: &MutatingWebhook| {
        webhook
            .client_config
            .ca_bundle
            .clone()
            .map(|bundle| bundle.0)
            .unwrap_or_default()
    };
    let webhooks = configuration.webhooks.as_deref().unwrap_or_default();
    let broken = |is_broken: &dyn Fn(&[u8]) -> bool| -> Vec<String> {
        webhooks
            .iter()
            .filter(|webhook| is_broken(&bundle(webhook)))
            .map(|webhook| webhook.name.clone())
            .collect()
    };
    let empty = broken(&|bundle| certificates::read(bundle).is_empty());
    if !empty.is_empty() {
        let text = "the caBundle of the webhook holds no certificate: the API server cannot verify the injector";
        return vec![Finding::problem(CHECK, text, REPAIRS).naming(empty)];
    }
    let serving = match &facts.serving {
        Err(why) => return vec![Finding::unknown(CHECK, why)],
        Ok(None) => {
            let text = format!(
                "Secret {}/diy-service-mesh-injector-tls, the injector's certificate, is not there",
                facts.namespace
            );
            return vec![Finding::problem(
                CHECK,
                text,
                "the injector makes it when it starts; if it does not, its log says why",
            )];
        }
        Ok(Some(serving)) => serving.as_bytes(),
    };
    let foreign = broken(&|bundle| !certificates::signed_by(serving, bundle));
    if !foreign.is_empty() {
        let text = "the caBundle of the webhook does not fit the certificate that the injector serves: pods that ask for the mesh cannot be made";
        return vec![Finding::problem(CHECK, text, REPAIRS).naming(foreign)];
    }
    let ends = certificates::validity(serving)
        .map(|(from, to)| (to.saturating_sub(from), to.saturating_sub(facts.now)));
    vec![match ends {
        Some((_, 0)) => Finding::problem(
            CHECK,
            "the injector's certificate has ended",
            "the injector renews it when it runs; its log says more",
        ),
        Some((life, left)) if left < life / 5 => {
            let text = format!(
                "the injector's certificate ends in {}, and should have been renewed before",
                span(left)
            );
            Finding::warning(CHECK, text, "the injector's log says why it has not")
        }
        Some((_, left)) => Finding::ok(
            CHECK,
            format!(
                "it fits the injector's certificate, which has {} left",
                span(left)
            ),
        ),
        None => Finding::problem(
            CHECK,
            "the injector's certificate cannot be read",
            "delete Secret diy-service-mesh-injector-tls: it is made anew",
        ),
    }]
}

/// A pod that asks gets a proxy: a trial that the API server does not keep.
pub(super) fn trial(facts: &Facts) -> Vec<Finding> {
    const CHECK: &str = "injection";
    vec![match &facts.trial {
        Err(why) => Finding::unknown(CHECK, why),
        Ok(Trial::Injected) => Finding::ok(
            CHECK,
            "a pod that asks for the mesh gets a proxy (tried, and not kept)",
        ),
        Ok(Trial::LeftAlone) => Finding::problem(
            CHECK,
            "a pod that asked for the mesh came back without a proxy (tried, and not kept)",
            "see what is said of the webhook; kubectl apply -k manifests puts it back",
        ),
        Ok(Trial::Failed(message)) => Finding::problem(
            CHECK,
            format!(
                "the API server cannot call the injector, so no pod that asks for the mesh can be made: {message}"
            ),
            if message.contains("x509") {
                format!(
                    "the API server does not trust the injector's certificate: see caBundle; {REPAIRS}"
                )
            } else {
                format!(
                    "is an injector ready (kubectl get pods -n {}), and may the API server reach it?",
                    facts.namespace
                )
            },
        ),
    }]
}

#[cfg(test)]
mod tests {
    use k8s_openapi::{ByteString, api::admissionregistration::v1::MutatingWebhookConfiguration};
    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

    use super::super::{Level, facts::testing::untold};
    use super::*;

    /// A CA, and a certificate of it.
    fn pair() -> (String, String) {
        let (ca_key, key) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
        let mut params = CertificateParams::new([]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca = params.self_signed(&ca_key).unwrap();
        let issuer = Issuer::from_params(&params, &ca_key);
        let leaf = CertificateParams::new(["injector".to_owned()])
            .unwrap()
            .signed_by(&key, &issuer)
            .unwrap();
        (ca.pem(), leaf.pem())
    }

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
            ..untold()
        }
    }

    #[test]
    fn a_bundle_of_another_authority_is_told_from_the_right_one_and_from_none() {
        let ((ca, leaf), (other, _)) = (pair(), pair());
        let level = |bundle: Option<&str>| ca_bundle(&facts(bundle, &leaf))[0].level;
        assert_eq!(level(Some(&ca)), Level::Ok);
        assert_eq!(level(Some(&format!("{other}{ca}"))), Level::Ok);
        assert_eq!(
            (level(Some(&other)), level(Some("x")), level(None)),
            (Level::Problem, Level::Problem, Level::Problem)
        );
        let finding = &ca_bundle(&facts(Some(&other), &leaf))[0];
        assert!(
            finding.text.contains("does not fit") && finding.details.len() == expected().len(),
            "{finding:?}"
        );
    }

    #[test]
    fn the_shipped_webhook_is_well_and_a_changed_one_is_told() {
        let mut facts = facts(None, "");
        assert_eq!(configuration(&facts)[0].level, Level::Ok);
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
        assert_eq!(configuration(&facts)[0].details.len(), 2);
        assert_eq!(
            configuration(&Facts {
                webhook: Ok(None),
                ..untold()
            })[0]
                .level,
            Level::Problem
        );
    }

    #[test]
    fn a_trial_that_fails_is_told_with_its_cause() {
        let told = |trial: Trial| trial_finding(trial);
        assert_eq!(told(Trial::Injected).level, Level::Ok);
        assert_eq!(told(Trial::LeftAlone).level, Level::Problem);
        let finding = told(Trial::Failed(
            "failed calling webhook: x509: certificate signed by unknown authority".into(),
        ));
        assert!(finding.advice.contains("caBundle"), "{finding:?}");
    }

    fn trial_finding(trial: Trial) -> Finding {
        super::trial(&Facts {
            trial: Ok(trial),
            ..untold()
        })
        .remove(0)
    }
}
