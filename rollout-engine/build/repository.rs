//! What git's own files say about the commit that is checked out: git itself need not be there.

use std::path::{Path, PathBuf};

/// Where the files of a checkout lie.
struct Places {
    /// Its own: `HEAD`.
    own: PathBuf,
    /// Those that it shares with the other worktrees of a repository: branches.
    common: PathBuf,
    /// The branch that is checked out, such as `refs/heads/main`, or a commit.
    head: String,
}

impl Places {
    /// From the `.git` at the root of a checkout.
    fn of(git: &Path) -> Option<Self> {
        // A worktree's is a file that names a folder, whose `commondir` names the repository's.
        let own = match std::fs::read_to_string(git) {
            Ok(text) => git.parent()?.join(text.strip_prefix("gitdir: ")?.trim()),
            Err(_) => git.to_path_buf(),
        };
        let head = std::fs::read_to_string(own.join("HEAD")).ok()?.trim().to_string();
        let common = match std::fs::read_to_string(own.join("commondir")) {
            Ok(relative) => own.join(relative.trim()),
            Err(_) => own.clone(),
        };
        Some(Self { own, common, head })
    }
}

/// The commit that is checked out where this `.git` lies.
pub(crate) fn commit(git: &Path) -> Option<String> {
    let Places { common, head, .. } = Places::of(git)?;
    let Some(name) = head.strip_prefix("ref: ") else {
        return is_commit(&head).then_some(head);
    };
    let found = match std::fs::read_to_string(common.join(name)) {
        Ok(commit) => commit.trim().to_string(),
        Err(_) => {
            let packed = std::fs::read_to_string(common.join("packed-refs")).ok()?;
            let line = packed.lines().find(|line| line.ends_with(&format!(" {name}")))?;
            line.split(' ').next()?.to_string()
        }
    };
    is_commit(&found).then_some(found)
}

/// The files of which one changes whenever another commit is checked out. Only such as exist: cargo takes one that does not
/// for one that has changed.
pub(crate) fn files(git: &Path) -> Vec<PathBuf> {
    let Some(Places { own, common, head }) = Places::of(git) else {
        return Vec::new();
    };
    let branch = head.strip_prefix("ref: ").map(|name| common.join(name));
    let branch = branch.filter(|file| file.is_file());
    // The log grows with every commit, also with the first after branches were packed, which makes a new file.
    let mut files = vec![own.join("HEAD"), own.join("logs/HEAD")];
    files.push(branch.unwrap_or(common.join("packed-refs")));
    files.retain(|file| file.is_file());
    files
}

fn is_commit(text: &str) -> bool {
    text.len() >= 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commit_is_found_in_repositories_and_worktrees_and_its_files_are_watched() {
        let dir = tempfile::tempdir().unwrap();
        let git = dir.path().join("repository/.git");
        let write = |path: &Path, text: &str| {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        // Names of the watched files, from the folder `.git` on.
        let watched = |git: &Path| -> Vec<String> {
            let real = dir.path().join("repository/.git").canonicalize();
            let files = files(git).into_iter().map(|file| {
                let file = file.canonicalize().unwrap();
                let file = file.strip_prefix(real.as_ref().unwrap()).unwrap().to_path_buf();
                file.to_str().unwrap().to_string()
            });
            files.collect()
        };
        let [a, b, c] = ["a", "b", "c"].map(|digit| digit.repeat(40));
        assert_eq!(commit(&git), None);
        assert!(files(&git).is_empty());
        write(&git.join("HEAD"), "ref: refs/heads/main\n");
        write(
            &git.join("packed-refs"),
            &format!("# pack-refs\n{a} refs/heads/main\n{b} refs/heads/side\n"),
        );
        assert_eq!(commit(&git).as_ref(), Some(&a));
        assert_eq!(watched(&git), ["HEAD", "packed-refs"]);
        write(&git.join("refs/heads/main"), &format!("{c}\n"));
        write(&git.join("logs/HEAD"), "a line for each commit\n");
        assert_eq!(commit(&git).as_ref(), Some(&c));
        assert_eq!(watched(&git), ["HEAD", "logs/HEAD", "refs/heads/main"]);
        write(&git.join("worktrees/side/HEAD"), "ref: refs/heads/side\n");
        write(&git.join("worktrees/side/commondir"), "../..\n");
        let worktree = dir.path().join("side/.git");
        write(&worktree, "gitdir: ../repository/.git/worktrees/side\n");
        assert_eq!(commit(&worktree).as_ref(), Some(&b));
        assert_eq!(watched(&worktree), ["worktrees/side/HEAD", "packed-refs"]);
        write(&git.join("HEAD"), &format!("{b}\n"));
        assert_eq!(commit(&git).as_ref(), Some(&b));
        write(&git.join("HEAD"), "nonsense");
        assert_eq!(commit(&git), None);
    }
}
