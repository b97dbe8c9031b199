//! The targets of a policy. Pure.

use super::{invalid, listed};
use crate::kinds::authorization::Target;
use crate::kinds::authorization::spec::{Selector, TargetRef};
use crate::object::fields::read_known;
use crate::object::rejection::{bounded, refuse};
use crate::object::{Key, Rejection, TargetReference};

const MAX_TARGETS: usize = 16;
/// The maximum number of labels in a selector, and of values of a label.
const MAX_LABELS: usize = 32;
const MAX_LABEL_VALUES: usize = 64;
/// Labels and values in the selectors of all targets: each change judges them under the lock of the
/// index, for each pod of the namespace.
const MAX_SELECTED: usize = 256;
/// The length of the name of a target in the status.
const MAX_NAME_CHARS: usize = 253;

/// A target in the status. Pods have the selector as the name.
pub(crate) fn reference(target: &Target) -> TargetReference {
    let (kind, name) = match target {
        Target::Pods(selector) => ("Pod", selector.to_string()),
        Target::Service(key) => ("Service", key.name.to_string()),
        Target::ServiceAccount(name) => ("ServiceAccount", name.clone()),
    };
    TargetReference {
        group: Some(String::new()),
        kind: Some(kind.to_owned()),
        name: name.chars().take(MAX_NAME_CHARS).collect(),
        ..TargetReference::default()
    }
}

pub(super) fn targets(key: &Key, json: &str) -> Result<Vec<Target>, Rejection> {
    let field = "spec.targetRefs";
    let targets: Vec<TargetRef> = read_known(json, field)?;
    listed(field, &targets, MAX_TARGETS)?;
    let targets = targets.into_iter().enumerate();
    let targets = targets.map(|(at, target)| self::target(key, target, &format!("{field}[{at}]")));
    let targets = targets.collect::<Result<Vec<_>, _>>()?;
    if targets.iter().map(labels_and_values).sum::<usize>() > MAX_SELECTED {
        return Err(invalid(format!(
            "{field}: expected at most {MAX_SELECTED} labels and values in all selectors"
        )));
    }
    Ok(targets)
}

fn labels_and_values(target: &Target) -> usize {
    let Target::Pods(selector) = target else {
        return 0;
    };
    let values = selector.match_expressions.iter();
    let values = values.map(|one| 1 + one.values.iter().flatten().count());
    selector.match_labels.len() + values.sum::<usize>()
}

fn target(key: &Key, target: TargetRef, field: &str) -> Result<Target, Rejection> {
    if !target.group.is_empty() {
        return refuse(field, "group", &target.group, "empty, the core group");
    }
    match (&*target.kind, target.name, target.selector) {
        ("Pod", None, Some(selector)) => {
            check_selector(&selector, &format!("{field}.selector"))?;
            Ok(Target::Pods(selector))
        }
        ("Service", Some(name), None) if !name.is_empty() => Ok(Target::Service(Key {
            namespace: key.namespace.clone(),
            name: name.into(),
        })),
        ("ServiceAccount", Some(name), None) if !name.is_empty() => {
            Ok(Target::ServiceAccount(name))
        }
        (kind, ..) => {
            let expected = "Pod with selector, or Service or ServiceAccount with name";
            refuse(field, "kind", kind, expected)
        }
    }
}

fn check_selector(selector: &Selector, field: &str) -> Result<(), Rejection> {
    let labels: Vec<_> = selector.match_labels.keys().collect();
    bounded(&format!("{field}.matchLabels"), &labels, MAX_LABELS)?;
    let field = format!("{field}.matchExpressions");
    bounded(&field, &selector.match_expressions, MAX_LABELS)?;
    for (at, one) in selector.match_expressions.iter().enumerate() {
        let (field, operator) = (format!("{field}[{at}]"), &*one.operator);
        match (operator, &one.values) {
            ("In" | "NotIn", Some(values)) => {
                listed(&format!("{field}.values"), values, MAX_LABEL_VALUES)?;
            }
            ("Exists" | "DoesNotExist", None) => {}
            _ => {
                let expected = "In or NotIn with values, or Exists or DoesNotExist without";
                return refuse(&field, "operator", operator, expected);
            }
        }
    }
    Ok(())
}
