//! JSON Web Tokens (RFC 7519), verified with the public keys of their issuer (a JWK set, RFC 7517).
//! The controller verifies tokens of service accounts, and proxies verify tokens of requests.
//!
//! The key determines the algorithm: a token cannot choose it.

#[cfg(test)]
mod tests;

use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::jwk::{
    AlgorithmParameters, EllipticCurve, Jwk, JwkSet, KeyOperations, PublicKeyUse,
};
use jsonwebtoken::{Algorithm, AlgorithmFamily, DecodingKey, Validation};
use serde::de::DeserializeOwned;

/// An unusable set of keys.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// It is no JWK set.
    #[error("not a JWK set: {0}")]
    Parse(#[from] serde_json::Error),
    /// It contains no usable key.
    #[error("no public key for tokens, expected RSA, P-256, P-384 or Ed25519")]
    Empty,
}

/// Why a token is refused. Displays a sentence whose subject is the token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// It is malformed, or without a signature.
    #[error("it is not a JWT with an algorithm that we know")]
    Malformed,
    /// Who can verify it could sign it too.
    #[error("its algorithm is symmetric, expected RS256, ES256 or another asymmetric one")]
    Symmetric,
    /// Its header has extensions that have to be understood (RFC 7515, section 4.1.11).
    #[error("its header has critical parameters (crit)")]
    Critical,
    /// No key has its key ID and algorithm.
    #[error("the issuer has no key with its key ID and algorithm")]
    UnknownKey,
    /// Another key has signed it.
    #[error("its signature is not by any of the issuer's keys")]
    Signature,
    /// It is too old.
    #[error("it has expired")]
    Expired,
    /// It is too new.
    #[error("it is not valid yet (nbf)")]
    NotYetValid,
    /// It is for others.
    #[error("its audience is not {0:?}")]
    Audience(String),
    /// It is of another issuer.
    #[error("its issuer is not {0:?}")]
    Issuer(String),
    /// It lacks a claim.
    #[error("the claim {0:?} is missing")]
    Missing(String),
    /// Its claims are not those that are expected.
    #[error("{0}")]
    Claims(String),
}

/// The claims of a token, which need not be true: nothing of it is verified.
pub fn unverified_claims<C: DeserializeOwned>(token: &str) -> Option<C> {
    jsonwebtoken::dangerous::insecure_decode_claims(token).ok()
}

/// The key ID of a token, which need not be true.
pub fn unverified_key_id(token: &str) -> Option<String> {
    jsonwebtoken::decode_header(token).ok()?.kid
}

/// The claims that a token must have.
#[derive(Clone, Debug)]
pub struct Expected {
    issuer: Option<String>,
    audiences: String,
    validation: Validation,
}

impl Expected {
    /// Tokens of this issuer, or of any, for one of these audiences, with an expiry. `leeway`: the
    /// tolerated difference to the clock of the issuer, in seconds.
    pub fn new(issuer: Option<&str>, audiences: &[impl AsRef<str>], leeway: u64) -> Expected {
        let audiences: Vec<&str> = audiences.iter().map(AsRef::as_ref).collect();
        // The key's algorithm takes the place of this one.
        let mut validation = Validation::new(Algorithm::RS256);
        validation.leeway = leeway;
        validation.validate_nbf = true;
        validation.set_audience(&audiences);
        validation.set_required_spec_claims(&["exp", "aud"]);
        if let Some(issuer) = issuer {
            validation.set_issuer(&[issuer]);
            validation.required_spec_claims.insert("iss".to_owned());
        }
        Expected {
            issuer: issuer.map(str::to_owned),
            audiences: audiences.join(" or "),
            validation,
        }
    }

    fn refused(&self, error: &jsonwebtoken::errors::Error) -> Refused {
        match error.kind() {
            ErrorKind::InvalidSignature => Refused::Signature,
            ErrorKind::ExpiredSignature => Refused::Expired,
            ErrorKind::ImmatureSignature => Refused::NotYetValid,
            ErrorKind::InvalidAudience => Refused::Audience(self.audiences.clone()),
            ErrorKind::InvalidIssuer => Refused::Issuer(self.issuer.clone().unwrap_or_default()),
            ErrorKind::MissingRequiredClaim(claim) => Refused::Missing(claim.clone()),
            _ => Refused::Claims(error.to_string()),
        }
    }
}

/// The public keys of an issuer.
#[derive(Debug)]
pub struct Keys(Vec<Key>);

#[derive(Debug)]
struct Key {
    id: Option<String>,
    algorithm: Algorithm,
    key: DecodingKey,
}

impl Keys {
    /// The keys of a JWK set that can verify tokens. The set may have other keys, too.
    pub fn parse(set: &[u8]) -> Result<Keys, KeysError> {
        let set: JwkSet = serde_json::from_slice(set)?;
        let keys: Vec<Key> = set.keys.iter().filter_map(Key::of).collect();
        if keys.is_empty() {
            return Err(KeysError::Empty);
        }
        Ok(Keys(keys))
    }

    /// The part of a JWK set that everyone may read: the keys that can verify tokens, without the
    /// members of private keys.
    pub fn public(set: &[u8]) -> Result<String, KeysError> {
        let mut set: JwkSet = serde_json::from_slice(set)?;
        set.keys.retain(|key| Key::of(key).is_some());
        if set.keys.is_empty() {
            return Err(KeysError::Empty);
        }
        Ok(serde_json::to_string(&set)?)
    }

    /// The number of keys, at least 1.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Whether a key has this ID.
    pub fn contains(&self, id: &str) -> bool {
        self.0.iter().any(|key| key.id.as_deref() == Some(id))
    }

    /// The claims of a token.
    pub fn verify<C: DeserializeOwned>(
        &self,
        token: &str,
        expected: &Expected,
    ) -> Result<C, Refused> {
        let header = jsonwebtoken::decode_header(token).map_err(|_| Refused::Malformed)?;
        if header.alg.family() == AlgorithmFamily::Hmac {
            return Err(Refused::Symmetric);
        }
        if header.crit.is_some() {
            return Err(Refused::Critical);
        }
        let mut validation = expected.validation.clone();
        validation.algorithms = vec![header.alg];
        let id = header.kid.as_deref();
        let mut refused = Refused::UnknownKey;
        for key in self.0.iter().filter(|key| key.fits(header.alg, id)) {
            match jsonwebtoken::decode(token, &key.key, &validation) {
                Ok(token) => return Ok(token.claims),
                Err(error) => refused = expected.refused(&error),
            }
        }
        Err(refused)
    }
}

impl Key {
    /// A key with which tokens can be verified. Shared secrets are ignored: who reads the set could
    /// sign with them.
    fn of(jwk: &Jwk) -> Option<Key> {
        let common = &jwk.common;
        let verifies = |all: &Vec<KeyOperations>| all.contains(&KeyOperations::Verify);
        let is_for_signatures = common
            .public_key_use
            .as_ref()
            .is_none_or(|one| *one == PublicKeyUse::Signature)
            && common.key_operations.as_ref().is_none_or(verifies);
        let of_type = match &jwk.algorithm {
            AlgorithmParameters::RSA(_) => Algorithm::RS256,
            AlgorithmParameters::EllipticCurve(key) => match key.curve {
                EllipticCurve::P256 => Algorithm::ES256,
                EllipticCurve::P384 => Algorithm::ES384,
                _ => return None,
            },
            AlgorithmParameters::OctetKeyPair(_) => Algorithm::EdDSA,
            _ => return None,
        };
        let algorithm = match common.key_algorithm {
            None => of_type,
            Some(named) => Algorithm::try_from(named).ok()?,
        };
        let is_of_type = match of_type {
            Algorithm::RS256 => algorithm.family() == AlgorithmFamily::Rsa,
            only => algorithm == only,
        };
        (is_for_signatures && is_of_type).then_some(Key {
            id: common.key_id.clone(),
            algorithm,
            key: DecodingKey::from_jwk(jwk).ok()?,
        })
    }

    fn fits(&self, algorithm: Algorithm, id: Option<&str>) -> bool {
        let is_same_id = match (id, self.id.as_deref()) {
            (Some(wanted), Some(id)) => wanted == id,
            _ => true,
        };
        is_same_id && self.algorithm == algorithm
    }
}
