//! Connections without HTTP: both ends send in turns, and either one ends its direction first.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::{OPAQUE, bytes, pieces, rng, text};

/// The bytes that each end sends, in turns. The one that begins sends the first turn, ends its
/// direction after the last one but one, and gets another turn before the other end closes.
pub struct Script {
    turns: Vec<Vec<u8>>,
}

impl Script {
    /// The script of an exchange. Its first turn begins with the number, and a mark if the client
    /// sends it on a connection of its own.
    pub fn new(seed: u64, number: u64, usage: u64) -> Self {
        let mut rng = rng(seed, number, usage);
        let turns = 2 * rng.usize(1..4);
        Self {
            turns: (0..turns).map(|_| bytes(&mut rng)).collect(),
        }
    }

    /// The same with the number at its start.
    pub fn numbered(seed: u64, number: u64, usage: u64) -> Self {
        let mut script = Self::new(seed, number, usage);
        let mark = [&[OPAQUE][..], &number.to_be_bytes()].concat();
        script.turns[0].splice(..0, mark);
        script
    }

    /// The transcript of the end that begins, or of the other one, if all bytes arrive.
    pub fn expected(&self, begins: bool) -> String {
        let received = self.turns.iter().skip(usize::from(begins)).step_by(2);
        let lines = received.map(|turn| format!("received {}\n", text(turn)));
        lines.collect::<String>() + "received the end\n"
    }

    /// Carries out the script at one end. The first `read` bytes were read before.
    pub async fn run<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: &mut S,
        begins: bool,
        read: usize,
    ) -> io::Result<String> {
        let mut transcript = String::new();
        let mut rng = rng(0, self.turns[0].len() as u64, 0);
        let last = self.turns.len() - 1;
        for (index, turn) in self.turns.iter().enumerate() {
            if (index % 2 == 0) == begins {
                for piece in pieces(&mut rng, turn) {
                    stream.write_all(piece).await?;
                    stream.flush().await?;
                }
                if index + 1 >= last {
                    stream.shutdown().await?;
                }
            } else {
                let known = if index == 0 { read } else { 0 };
                let mut received = turn[..known].to_vec();
                received.resize(turn.len(), 0);
                stream.read_exact(&mut received[known..]).await?;
                transcript += &format!("received {}\n", text(&received));
                // The other end has ended its direction, and still receives.
                if index + 1 >= last {
                    let mut rest = Vec::new();
                    stream.read_to_end(&mut rest).await?;
                    transcript += &match text(&rest) {
                        none if none.is_empty() => "received the end\n".to_owned(),
                        more => format!("received more: {more}\n"),
                    };
                }
            }
        }
        Ok(transcript)
    }
}
