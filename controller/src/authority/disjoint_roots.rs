//! Whether the roots that are about to be published know any of those that pods trust already. In a
//! rotation they always do. They do not where the CA was replaced, under another root, while no
//! controller had the one before. Pure; it hinders nothing.

use super::Roots;

/// How many places are named.
const MAX_NAMES: usize = 5;

/// Whether roots that stand somewhere have none in common with these. Where no root can be read,
/// nobody trusts any.
pub(super) fn are_disjoint(roots: &Roots, there: &str) -> bool {
    let there = Roots::from_pem(there)
        .map(|roots| roots.certificates)
        .unwrap_or_default();
    !there.is_empty() && !there.iter().any(|root| roots.certificates.contains(root))
}

/// What it means that this is so in these places, and what to do. None where there are none.
pub(super) fn warning(places: &[String]) -> Option<String> {
    let more = places.len().saturating_sub(MAX_NAMES);
    let named = places
        .iter()
        .take(MAX_NAMES)
        .map(String::as_str)
        .collect::<Vec<_>>()
        .join(", ");
    let rest = if more > 0 {
        format!(" and {more} more")
    } else {
        String::new()
    };
    (!places.is_empty()).then(|| {
        format!(
            "the CA was replaced, under another root, while no controller had the one before: the trust roots in {named}{rest} have none in \
             common with those of the CA that is in use. Pods that run trust the former root and pods that start the new one; they refuse \
             each other's certificates, and requests between them fail, until every proxy has the new roots and a new certificate, which \
             takes some minutes. To move without that: put the former CA back into tls.crt, tls.key and ca.crt, wait until the controllers \
             use it, and replace it then, while they run: they wait until all proxies trust both roots. `mesh rotate-root` replaces a CA \
             that the mesh has made"
        )
    })
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;
    use crate::authority::self_signed;

    #[test]
    fn detects_sets_without_common_root() {
        let new = || {
            self_signed(
                "cluster.local",
                SystemTime::now(),
                Duration::from_secs(3600),
            )
            .unwrap()
            .0
        };
        let (old, next, other) = (new(), new(), new());
        let both = Roots::from_pem(&(old.clone() + &next)).unwrap();
        let alone = Roots::from_pem(&next).unwrap();
        assert!(!are_disjoint(&both, &old), "announced");
        assert!(!are_disjoint(&alone, &both.pem), "the old one is dropped");
        assert!(are_disjoint(&alone, &old) && are_disjoint(&alone, &(old + &other)));
        assert!(!are_disjoint(&alone, "") && !are_disjoint(&alone, "edited by somebody"));
    }

    #[test]
    fn the_warning_names_a_few_places_what_happens_and_what_to_do() {
        assert_eq!(warning(&[]), None);
        let places: Vec<String> = (1..=7)
            .map(|number| format!("namespace shop-{number}"))
            .collect();
        let text = warning(&places).unwrap();
        for part in [
            "namespace shop-1, ",
            "namespace shop-5 and 2 more",
            "requests between them fail",
            "put the former CA back",
            "mesh rotate-root",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(
            warning(&places[..1])
                .unwrap()
                .contains("roots in namespace shop-1 have")
        );
    }
}
