//! Tokens that were verified before: clients send the same one with each request, and a signature
//! costs as much as all the rest of a request. Pure: the caller passes the clock.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aws_lc_rs::digest::{SHA256, digest};
use serde_json::Value;

use super::LEEWAY;

/// The number of tokens. With more, all are forgotten.
const MAX_TOKENS: usize = 256;
/// The length of a token. Longer ones are verified each time.
const MAX_TOKEN_BYTES: usize = 4096;

/// Valid tokens of one issuer, by their digests.
#[derive(Debug, Default)]
pub(super) struct Verified(Mutex<HashMap<[u8; 32], Known>>);

#[derive(Debug)]
struct Known {
    claims: Arc<Value>,
    /// In seconds since 1970.
    expires: u64,
}

impl Verified {
    /// The claims of a token, if it is known and valid at this time, in seconds since 1970. Else those
    /// that `verify` returns, which are remembered.
    pub(super) fn claims<E>(
        &self,
        token: &str,
        now: u64,
        verify: impl FnOnce() -> Result<Value, E>,
    ) -> Result<Arc<Value>, E> {
        if token.len() > MAX_TOKEN_BYTES {
            return verify().map(Arc::new);
        }
        let name = name(token);
        if let Some(known) = self.tokens().get(&name).filter(|known| now < known.expires) {
            return Ok(known.claims.clone());
        }
        let claims = Arc::new(verify()?);
        let known = Known {
            claims: claims.clone(),
            expires: claims["exp"]
                .as_u64()
                .unwrap_or_default()
                .saturating_add(LEEWAY),
        };
        let mut tokens = self.tokens();
        if tokens.len() >= MAX_TOKENS {
            tokens.clear();
        }
        tokens.insert(name, known);
        Ok(claims)
    }

    fn tokens(&self) -> MutexGuard<'_, HashMap<[u8; 32], Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn name(token: &str) -> [u8; 32] {
    let mut name = [0; 32];
    name.copy_from_slice(digest(&SHA256, token.as_bytes()).as_ref());
    name
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use serde_json::json;

    use super::*;

    #[test]
    fn known_token_is_verified_again_only_when_it_has_expired() {
        let (verified, calls) = (Verified::default(), Cell::new(0));
        let claims = |token: &str, now| {
            verified.claims(token, now, || {
                calls.set(calls.get() + 1);
                if now < 1000 + LEEWAY {
                    Ok(json!({"sub": token, "exp": 1000}))
                } else {
                    Err("expired")
                }
            })
        };
        for (token, now, expected) in [
            ("a", 10, 1),
            ("a", 999 + LEEWAY, 1),
            ("b", 10, 2),
            ("b", 11, 2),
            ("a", 12, 2),
        ] {
            assert_eq!(claims(token, now).unwrap()["sub"], token);
            assert_eq!(calls.get(), expected);
        }
        assert_eq!(claims("a", 1000 + LEEWAY), Err("expired"));
        assert_eq!(calls.get(), 3);
    }

    #[test]
    fn refused_and_long_tokens_are_not_remembered_and_the_others_are_bounded() {
        let verified = Verified::default();
        let valid = || Ok::<_, &str>(json!({"exp": 1000}));
        assert_eq!(verified.claims("bad", 0, || Err("no")), Err("no"));
        let long = "t".repeat(MAX_TOKEN_BYTES + 1);
        verified.claims(&long, 0, valid).unwrap();
        assert_eq!(verified.tokens().len(), 0);
        for number in 0..2 * MAX_TOKENS + 1 {
            verified.claims(&number.to_string(), 0, valid).unwrap();
            assert!(verified.tokens().len() <= MAX_TOKENS);
        }
    }
}
