//! Two random choices: of two endpoints drawn at random the cheaper one. Pure: dice and comparison are passed in.
//!
//! That two draws are exponentially better than one, and a third adds little, is shown in M. Mitzenmacher, "The Power of
//! Two Choices in Randomized Load Balancing" (IEEE TPDS 12(10), 2001).

use fastrand::Rng;

/// Draws that may hit something unusable before all are looked at in turn.
const DRAWS: usize = 8;

/// One of `0..count` that is usable: of two drawn at random the second where it is cheaper than the first. `None` where none
/// is usable. Takes constant time while most are usable, and never allocates.
pub(super) fn choose(
    count: usize,
    rng: &mut Rng,
    usable: impl Fn(usize) -> bool,
    is_cheaper: impl Fn(usize, usize) -> bool,
) -> Option<usize> {
    let first = draw(count, rng, &usable)?;
    let Some(second) = draw(count, rng, |index| index != first && usable(index)) else {
        return Some(first);
    };
    Some(if is_cheaper(second, first) {
        second
    } else {
        first
    })
}

fn draw(count: usize, rng: &mut Rng, usable: impl Fn(usize) -> bool) -> Option<usize> {
    if count == 0 {
        return None;
    }
    let drawn = (0..DRAWS)
        .map(|_| rng.usize(..count))
        .find(|index| usable(*index));
    drawn.or_else(|| {
        let start = rng.usize(..count);
        (start..count).chain(0..start).find(|index| usable(*index))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn alike(_: usize, _: usize) -> bool {
        false
    }

    fn counts(
        count: usize,
        picks: usize,
        usable: impl Fn(usize) -> bool,
        is_cheaper: impl Fn(usize, usize) -> bool,
    ) -> Vec<usize> {
        let mut rng = Rng::with_seed(7);
        let mut counts = vec![0; count];
        for _ in 0..picks {
            counts[choose(count, &mut rng, &usable, &is_cheaper).expect("one is usable")] += 1;
        }
        counts
    }

    #[test]
    fn equals_share_alike() {
        for count in counts(10, 10_000, |_| true, alike) {
            assert!((900..1100).contains(&count), "{count}");
        }
    }

    #[test]
    fn the_dearest_is_never_taken_and_the_cheapest_twice_its_share() {
        let counts = counts(4, 12_000, |_| true, |one, other| one < other);
        // Of the 6 pairs of 4, the cheapest wins 3, the next 2, the next 1, and the dearest none.
        for (count, expected) in counts.into_iter().zip([6000_usize, 4000, 2000, 0]) {
            assert!(
                count.abs_diff(expected) < 300,
                "{count} where {expected} was expected"
            );
        }
    }

    #[test]
    fn only_usable_ones_are_taken_and_share_alike() {
        let counts = counts(10, 9_000, |index| index % 3 == 0, alike);
        for (index, count) in counts.into_iter().enumerate() {
            if index % 3 == 0 {
                assert!((1900..2600).contains(&count), "{count}")
            } else {
                assert_eq!(count, 0)
            }
        }
    }

    #[test]
    fn a_single_usable_one_among_many_is_found() {
        assert_eq!(counts(1000, 50, |index| index == 617, alike)[617], 50);
    }

    #[test]
    fn nothing_comes_of_nothing() {
        let mut rng = Rng::with_seed(7);
        assert_eq!(choose(0, &mut rng, |_| true, alike), None);
        assert_eq!(choose(5, &mut rng, |_| false, alike), None);
        assert_eq!(choose(1, &mut rng, |_| true, alike), Some(0));
    }
}
